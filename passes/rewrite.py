"""Rewrite: the planned global graph becomes the local graph of one rank.

Before::                                  After (rank 1 of 2)::

    conv2d(x, w, b, [1, 1], [3, 3])       slice = fxshard.slice(x, 3, [0, 32, 64], ...)
                                          halo_exchange = fxshard.halo_exchange(slice, 3, [0, 32, 64], ...)
                                          sum_gradient = fxshard.sum_gradient(w, ...)
                                          conv2d(halo_exchange, sum_gradient, ..., [1, 1], [3, 0])

Each node's inputs are converted to the layouts that its plan wants (``fxshard.conversion``), once for each
layout and gradient mode; then its rule emits the local program.  Every rank emits the same nodes.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch import set_grad_enabled
from fxshard.conversion import convert, laid_out_as
from fxshard.emitter import Emitter
from fxshard.errors import CaptureError
from fxshard.layout import Layout, in_chunks, replicated
from fxshard.ops.memory import empty_like_order, memory_order
from fxshard.passes.capture import KEY, SOURCE, Captured
from fxshard.provenance import source_line
from fxshard.rules import OpCall, emit_same, find_rule
from fxshard.values import NodePlan, depends_on_data, is_tensor, passes_gradient, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.passes.config import Config

OUTPUTS = "fxshard_outputs"
VALUES = "fxshard_values"


def rewrite(gm: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Return the local graph of ``config.rank``.

    Args:
        gm: A planned graph.
        config: The mesh and the rank.

    Returns:
        A new graph module with the same inputs and the same outputs (global, unless the configuration says local;
        without the buffer updates, which it writes to the buffers itself).  ``meta["fxshard_outputs"]`` has the
        layout of each output and the output's global fake value, ``meta["fxshard_values"]`` the names of the local
        nodes that hold the parts of each global one.
    """
    return _Rewriter(gm, config).run()


class _Rewriter:
    """Walks the global graph and emits the local one."""

    def __init__(self, gm: fx.GraphModule, config: Config) -> None:
        self.gm, self.config = gm, config
        self.captured: Captured = gm.meta[KEY]
        mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if is_tensor(n))
        assert config.rank is not None, "a local graph is one rank's"
        self.rank = config.rank
        self.emitter = Emitter(fx.Graph(), config.rank, mode)
        self.local: dict[fx.Node, Any] = {}
        self.buffers: list[fx.Node] = []
        self.converted: dict[tuple[Any, ...], fx.Node] = {}
        self.needs_grad: dict[fx.Node, bool] = {}
        self.grad_region, self.grad_enabled = 0, self.captured.grad_enabled
        self.whole = replicated(len(config.mesh_shape))
        self.parts: set[fx.Node] = set()
        self.outputs: list[tuple[Layout, torch.Tensor | None]] = []

    def run(self) -> fx.GraphModule:
        """Return the local graph module."""
        self._placeholders()
        for node in self.gm.graph.nodes:
            self.emitter.origin = node
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._output(node)
            else:
                arrives = self.grad_enabled and any(self.needs_grad[n] for n in node.all_input_nodes)
                self.needs_grad[node] = arrives and passes_gradient(node)
                self.local[node] = self._get_attr(node) if node.op == "get_attr" else self._call(node)
        for name, constant in self.emitter.constants.items():
            self.gm.register_buffer(name, constant, persistent=False)
        local = fx.GraphModule(self.gm, self.emitter.graph)
        local.meta[OUTPUTS] = tuple(self.outputs)
        local.meta[VALUES] = {n.name: v.name for n, v in self.local.items() if isinstance(v, fx.Node) and is_tensor(n)}
        local.graph.lint()
        return local

    def _placeholders(self) -> None:
        """Emit the inputs, whole as they are passed, then the slices of those that are planned split."""
        inputs = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.parts = {inputs[number] for number, _ in self.config.parts}
        for node, needs_grad in zip(inputs, self.captured.requires_grad, strict=True):
            self.emitter.origin, self.needs_grad[node] = node, needs_grad
            self.local[node] = made = self.emitter.graph.placeholder(str(node.target))
            self.emitter.adopt(made)
            made.meta["val"] = self._part_value(node) if node in self.parts else node.meta.get("val")
            if hasattr(node, SOURCE):
                setattr(made, SOURCE, getattr(node, SOURCE))
        for target in self.captured.updates:  # autograd may keep what is read of a buffer that is written below
            node = inputs[target]
            self.buffers.append(self.local[node])
            self.local[node] = self.emitter.call(torch.ops.aten.clone.default, self.local[node])
        for node in inputs:
            self.emitter.origin = node
            if self.needs_grad[node] and node not in self.parts:  # once, so that its gradient is put together once
                self.local[node] = convert(self.emitter, self.local[node], self.whole, _first_output(node))

    def _part_value(self, node: fx.Node) -> torch.Tensor:
        """Return the fake value of an input of which this rank passes its part."""
        value = tensor_value(node)
        shape = _first_output(node).local_shape(value.shape, self.rank.coords)
        with self.emitter.fake_mode:
            return empty_like_order(value, shape, memory_order(value))

    def _get_attr(self, node: fx.Node) -> fx.Node:
        made = self.emitter.graph.get_attr(str(node.target))
        self.emitter.adopt(made)
        made.meta["val"] = node.meta.get("val")
        return made

    def _call(self, node: fx.Node) -> Any:
        found = plan_of(node)
        assert found is not None
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._item(self.local[node.args[0]], node.args[1])
        if isinstance(node.target, torch._ops.OpOverload) and not depends_on_data(node):
            return self._operator(node, found)
        if node.target is set_grad_enabled:
            self.grad_region, self.grad_enabled = self.grad_region + 1, bool(node.args[0])
        replacements = {n: self._as_on_one_device(n, self.whole) for n in node.all_input_nodes}
        made = self.emitter.graph.node_copy(node, lambda n: replacements[n])
        self.emitter.adopt(made)
        return made

    def _item(self, parent: Any, index: Any) -> Any:
        return parent[index] if isinstance(parent, tuple) else self.emitter.call(operator.getitem, parent, index)

    def _operator(self, node: fx.Node, found: NodePlan) -> Any:
        call, axes = OpCall(node), found.sharded_axes
        rule = find_rule(call.op)
        summed = frozenset[int]() if rule and rule.whole_gradients else axes
        if rule is None:
            inputs = [self._as_on_one_device(n, want) for n, want in zip(call.inputs, found.inputs, strict=True)]
        else:
            inputs = [self._input(n, want, summed) for n, want in zip(call.inputs, found.inputs, strict=True)]
        emit = rule.emit if rule and (axes or rule.always) else emit_same
        made = emit(self.emitter, call, found, inputs)
        self._check(node, found, made)
        return made

    def _check(self, node: fx.Node, found: NodePlan, made: Any) -> None:
        """Assert that a rule emitted the local shapes that the plan says: our own bug if not."""
        locals_ = made if isinstance(made, tuple) else (made,)
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        local_values = [m.meta["val"] if isinstance(m, fx.Node) else None for m in locals_]
        if len(local_values) == 1 and isinstance(local_values[0], (tuple, list)):
            local_values = list(local_values[0])
        for value, layout, local in zip(values, found.outputs, local_values, strict=False):
            if isinstance(value, torch.Tensor) and isinstance(local, torch.Tensor):
                want = layout.local_shape(value.shape, self.rank.coords)
                assert tuple(local.shape) == want, (
                    f"{node.format_node()}: local {tuple(local.shape)}, plan {want} for {layout}"
                )

    def _input(self, node: fx.Node, want: Layout, axes: frozenset[int]) -> fx.Node:
        """Return ``node``'s local value in the layout ``want`` for work that is split on ``axes``."""
        have = self._layout(node)
        needs_grad = self.needs_grad[node] and self.grad_enabled
        key = (node, want, axes if needs_grad else None, self.grad_region)
        if key not in self.converted:
            summed = axes if needs_grad else frozenset()
            self.converted[key] = convert(self.emitter, self.local[node], have, want, summed, needs_grad=needs_grad)
        return self.converted[key]

    def _as_on_one_device(self, node: fx.Node, whole: Layout) -> fx.Node:
        """Return ``node``'s whole value in the memory order of one device: what reads it may depend on strides."""
        local = self._input(node, whole, frozenset())
        as_it_is = not is_tensor(node) or depends_on_data(node)
        return local if as_it_is else laid_out_as(self.emitter, local, tensor_value(node))

    def _layout(self, node: fx.Node) -> Layout:
        """Return how the local value of ``node`` is placed."""
        sliced = node.op != "placeholder" or self.needs_grad[node] or node in self.parts
        if not is_tensor(node) or not sliced:
            return self.whole
        return _first_output(node)

    def _output(self, node: fx.Node) -> None:
        """Emit the updates of buffers and other inputs, and the outputs: whole, or as a DTensor holds them."""
        values, count = list(node.args[0]), len(self.buffers)  # type: ignore[arg-type]
        inputs = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        updates = [(inputs[t], b, v) for t, b, v in zip(self.captured.updates, self.buffers, values, strict=False)]
        recorded = [update for update in updates if inputs.index(update[0]) in self.captured.recorded]
        for target, buffer, value in recorded:
            self._refuse_part(target, value)
            self.emitter.call(torch.ops.aten.copy_.default, buffer, self._new(target, value))
        self._overwrite([update for update in updates if update not in recorded])
        self.emitter.graph.output(tuple(self._result(value) for value in values[count:]))

    def _new(self, target: fx.Node, value: Any) -> Any:
        """Return the new value of an input, as the caller holds it."""
        want = self._layout(target) if target in self.parts else self.whole
        return self._input(value, want, frozenset()) if isinstance(value, fx.Node) else value

    def _overwrite(self, updates: Sequence[tuple[fx.Node, fx.Node, Any]]) -> None:
        """Emit updates that autograd knows nothing of: a parameter is written in no_grad."""
        detached = [(b, self.emitter.call(torch.ops.aten.detach.default, self._new(t, v))) for t, b, v in updates]
        hidden = self.grad_enabled and any(self.needs_grad[target] for target, _, _ in updates)
        if hidden:
            self.emitter.graph.call_function(set_grad_enabled, (False,))
        for buffer, value in detached:
            self.emitter.call(torch.ops.aten.copy_.default, buffer, value)
        if hidden:
            self.emitter.graph.call_function(set_grad_enabled, (True,))

    def _refuse_part(self, target: fx.Node, value: fx.Node) -> None:
        """Refuse to give an input a new history where the caller does not hold what the graph is given.

        Raises:
            CaptureError: A rank passes its part.
        """
        if target in self.parts:
            name = getattr(getattr(target, SOURCE, None), "name", target.name)
            msg = (
                f"the model writes into its input {name() if callable(name) else name}, of which a rank passes its "
                f"part, and autograd records it ({source_line(value)}); clone the input first"
            )
            raise CaptureError(msg)

    def _result(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            self.outputs.append((self.whole, None))
            return value
        split = self.config.local_outputs and is_tensor(value) and not depends_on_data(value)
        layout = in_chunks(self._layout(value), tensor_value(value).shape) if split else self.whole
        self.outputs.append((layout, value.meta["val"]))
        return self._input(value, layout, frozenset())


def _first_output(node: fx.Node) -> Layout:
    found = plan_of(node)
    assert found is not None
    return found.outputs[0] if is_tensor(node) else replicated(len(found.outputs[0].axes))

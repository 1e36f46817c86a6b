"""Apply autocast: the casts that autocast makes become nodes, and its regions disappear.

Capture records what the user calls, above autocast, so a graph captured under autocast would compute in float32.
This pass runs before it, on the graph that Dynamo hands over.

Before, with bfloat16 autocast around the call::  After::

    conv2d = torch.conv2d(x, weight, bias)            _to_copy = aten._to_copy(x, dtype=bfloat16); ...
    enter = _enter_autocast("cpu", None, False)       conv2d = torch.conv2d(_to_copy, _to_copy_1, _to_copy_2)
    norm = F.group_norm(conv2d.float(), 3)            norm = F.group_norm(conv2d.float(), 3)
    _exit_autocast(enter)
    einsum = torch.einsum("nchw,nc->nhw", norm, y)    einsum = autocast_einsum(norm, y)

What autocast does to a call is found out (:mod:`fxshard.passes.autocast_effect`), not looked up in a table:

    nothing                                   the call stays
    it casts inputs                           the casts are inserted; the call stays, whole for the rules
    more (a bmm within einsum is cast)        the call becomes its trace, as a submodule that capture inlines

A cast is made once for each argument, as autocast does, but for parameters, whose casts autocast caches until its
outermost region ends: their gradients are then added in the low precision.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxshard._torch import set_grad_enabled, tag_activation_checkpoint
from fxshard.passes.autocast_effect import CAST, EXAMPLE, Call, Prober, autocast_enabled, may_be_cast
from fxshard.passes.capture import SOURCE

if TYPE_CHECKING:
    from collections.abc import Sequence

REGION_ENDS = (torch.amp._enter_autocast, torch.amp._exit_autocast)


def apply_autocast(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph with the casts that autocast makes as nodes.

    Run it under the autocast state that the graph is called in; the result is to be run without autocast.

    Args:
        gm: What Dynamo hands to a backend; it is not changed.
        example_inputs: Its inputs, real or fake.

    Returns:
        A new graph module with the same inputs, values, dtypes and gradients as ``gm`` has under autocast; ``gm``
        itself where there is no autocast.

    Raises:
        CaptureError: It cannot be told what autocast does to a call; the message has the user's line.
    """
    if not autocast_enabled() and not has_regions(gm):
        return gm
    return _Applier(gm, example_inputs, Prober()).run()


def has_regions(gm: fx.GraphModule) -> bool:
    """Return whether a graph, or one that it calls, has autocast regions."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(node.target in REGION_ENDS for graph in graphs for node in graph.nodes)


class _Applier:
    """Copies a graph node by node under the autocast state that each node has."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], prober: Prober) -> None:
        self.gm, self.prober = gm, prober
        self.given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self.ambient, self.grad_enabled = autocast_enabled(), torch.is_grad_enabled()
        self.regions: list[torch.autocast] = []
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.cached: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
        self.attributes: dict[str, Any] = {}

    def run(self) -> fx.GraphModule:
        """Return the new graph module."""
        try:
            for node in self.gm.graph.nodes:
                self._visit(node)
        finally:
            while self.regions:
                self._leave()
        result = fx.GraphModule(self.attributes, self.graph)
        result.meta.update(self.gm.meta)
        return result

    def _visit(self, node: fx.Node) -> None:
        if node.target is torch.amp._enter_autocast:
            self._enter(node)
        elif node.target is torch.amp._exit_autocast:
            self._leave()
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self.copies[node] = self._higher_order(node)
        elif node.op in {"call_function", "call_method", "call_module"}:
            self.copies[node] = self._call(node)
        elif not isinstance(self._attribute(node), fx.GraphModule):  # else copied for each call of it
            self.copies[node] = self._copy(node)

    def _enter(self, node: fx.Node) -> None:
        device, dtype, enabled, cache_enabled = node.args
        region = torch.autocast(device, dtype, enabled, cache_enabled)  # type: ignore[arg-type]
        region.__enter__()
        self.regions.append(region)

    def _leave(self) -> None:
        self.regions.pop().__exit__(None, None, None)
        if not self.regions and not self.ambient:
            self.cached.clear()

    def _attribute(self, node: fx.Node) -> object:
        return operator.attrgetter(str(node.target))(self.gm) if node.op in {"get_attr", "call_module"} else None

    def _value(self, node: fx.Node) -> Any:
        if node in self.given:
            return self.given[node]
        return node.meta[EXAMPLE] if EXAMPLE in node.meta else self._attribute(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op in {"get_attr", "call_module"}:
            self.attributes[str(node.target)] = self._attribute(node)
        made = self.graph.node_copy(node, self.copies.__getitem__)
        if hasattr(node, SOURCE):
            setattr(made, SOURCE, getattr(node, SOURCE))
        return made

    def _call(self, node: fx.Node) -> fx.Node:
        if node.target is set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
        call = Call(node, self._value)
        if not any(may_be_cast(v) for v in pytree.tree_leaves(call.values)):
            return self._copy(node)
        if node.op == "call_module":
            reason = "it calls a module; leave torch._dynamo.config.inline_inbuilt_nn_modules at True"
            raise call.failure(reason)
        effect = self.prober.effect(call)
        if effect.program is not None:
            return self._program(node, call, effect.program)
        made = self._copy(node)
        with self.graph.inserting_before(made):
            given = [self._cast(node, n, effect.casts.get(i)) for i, n in enumerate(call.inputs)]
        made.args, made.kwargs = call.bind(given)
        return made

    def _cast(self, user: fx.Node, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """Return the copy of ``node`` in ``dtype``, made for ``user``."""
        if dtype is None:
            return self.copies[node]
        key = (node, dtype, self.grad_enabled)
        if key in self.cached:
            return self.cached[key]
        made = self.graph.call_function(CAST, (self.copies[node],), {"dtype": dtype})
        made.meta.update({k: v for k, v in user.meta.items() if k != EXAMPLE})
        if EXAMPLE in node.meta:
            made.meta[EXAMPLE] = node.meta[EXAMPLE].to(dtype)
        if _is_cached(self._value(node), dtype):
            self.cached[key] = made
        return made

    def _program(self, node: fx.Node, call: Call, program: fx.GraphModule) -> fx.Node:
        name = next((n for n, module in self.attributes.items() if module is program), None)
        name = name or self._add_module(f"autocast_{node.name}", program)
        made = self.graph.call_module(name, tuple(self.copies[n] for n in call.inputs))
        made.meta.update(node.meta)
        return made

    def _add_module(self, name: str, module: torch.nn.Module) -> str:
        while hasattr(self.gm, name) or name in self.attributes:
            name += "_"
        self.attributes[name] = module
        return name

    def _higher_order(self, node: fx.Node) -> fx.Node:
        """Copy a call of subgraphs, with autocast applied in them."""
        bodies = {n: self._attribute(n) for n in node.all_input_nodes}
        for body, gm in bodies.items():
            if not isinstance(gm, fx.GraphModule):
                continue
            if node.target is tag_activation_checkpoint:
                values = [self._value(n) if isinstance(n, fx.Node) else n for n in node.args[1:]]
                gm = _Applier(gm, values, self.prober).run()
            elif autocast_enabled() or has_regions(gm):
                reason = "it calls subgraphs, and only those of activation checkpointing are supported"
                raise Call(node, self._value).failure(reason)
            self.copies[body] = self.graph.get_attr(self._add_module(f"autocast_{body.target}", gm))
            self.copies[body].meta.update(body.meta)
        return self._copy(node)


def _is_cached(value: object, dtype: torch.dtype) -> bool:
    """Return whether autocast caches the cast: that of a float32 leaf that needs a gradient, to the low precision."""
    return (
        isinstance(value, torch.Tensor)
        and torch.is_autocast_cache_enabled()
        and value.dtype == torch.float32
        and dtype == torch.get_autocast_dtype(value.device.type)
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )

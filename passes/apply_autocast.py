"""Apply autocast: the casts that autocast makes become nodes, and its regions disappear.

Capture records what the user calls, above autocast, so a graph captured under autocast would compute in float32.
This pass runs before it, on the graph that Dynamo hands over.

Before, with bfloat16 autocast around the call::  After::

    conv2d = torch.conv2d(x, weight, bias)            _to_copy = aten._to_copy(x, dtype=bfloat16); ...
    enter = _enter_autocast("cpu", None, False)       conv2d = torch.conv2d(_to_copy, _to_copy_1, _to_copy_2)
    norm = F.group_norm(conv2d.float(), 3)            norm = F.group_norm(conv2d.float(), 3)
    _exit_autocast(enter)
    einsum = torch.einsum("nchw,nc->nhw", norm, y)    einsum = autocast_einsum(norm, y)

What autocast does to a call is not in a table here: the call is traced with and without autocast, below both.

    the traces are equal                      the call stays
    equal, once these inputs are cast         the casts are inserted; the call stays, whole for the rules
    else (a bmm within einsum is cast)        the call becomes its trace, as a submodule that capture inlines

A cast is made once for each argument, as autocast does, but for parameters, whose casts autocast caches until its
outermost region ends: their gradients are then added in the low precision.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxshard._torch import FakeTensorMode, make_fx, set_grad_enabled
from fxshard.errors import CaptureError
from fxshard.passes.capture import SOURCE, concrete
from fxshard.passes.lower import without_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEVICES = ("cpu", "cuda")
CAST = torch.ops.aten._to_copy.default
REGION_ENDS = (torch.amp._enter_autocast, torch.amp._exit_autocast)
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
EXAMPLE = "example_value"


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
    if not _state_enabled() and not has_regions(gm):
        return gm
    return _Applier(gm, example_inputs, _Prober()).run()


def has_regions(gm: fx.GraphModule) -> bool:
    """Return whether a graph, or one that it calls, has autocast regions."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(node.target in REGION_ENDS for graph in graphs for node in graph.nodes)


def _state_enabled() -> bool:
    return any(torch.is_autocast_enabled(device) for device in DEVICES)


def _state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


def _may_be_cast(value: object) -> bool:
    """Return whether autocast, as it is, casts such a tensor for some operator."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type in DEVICES
        and torch.is_autocast_enabled(value.device.type)
    )


@dataclass(frozen=True)
class _Blank:
    """What a call's effect depends on in a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _blank(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return concrete(value)
    shape, stride = (tuple(int(n) for n in numbers) for numbers in (value.shape, value.stride()))
    return _Blank(shape, stride, value.dtype, value.device)


class _Call:
    """A node's call as a function of the nodes among its arguments, one input for each time that one is passed."""

    def __init__(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> None:
        self.node = node
        self.inputs: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), self.inputs.append)
        self.values = [values(n) for n in self.inputs]

    def bind(self, given: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments and keywords with ``given`` in place of the nodes."""
        left = iter(given)
        bound: tuple[Any, Any] = fx.map_arg((self.node.args, self.node.kwargs), lambda _: next(left))
        return bound

    def run(self, *given: Any) -> Any:
        """Call the node's target with ``given`` in place of the nodes."""
        args, kwargs = self.bind(given)
        if self.node.op == "call_method":
            return getattr(args[0], str(self.node.target))(*args[1:], **kwargs)
        assert callable(self.node.target)
        return self.node.target(*args, **kwargs)

    def failure(self, reason: object) -> CaptureError:
        """Return the error that names the node and the user's line."""
        line = self.node.meta.get("stack_trace", "").strip()
        msg = (
            f"cannot tell what autocast does to {self.node.format_node()}: {reason}\n{line}\n"
            "put this call in a region with torch.autocast(..., enabled=False) and cast its inputs yourself"
        )
        return CaptureError(msg)


@dataclass(frozen=True)
class _Effect:
    """What autocast does to a call.

    Args:
        casts: The dtype that it casts inputs to, by position.
        program: Stands for the whole call where casts of its inputs do not explain it.
        dtypes: Of the tensors that the call returns.
    """

    casts: Mapping[int, torch.dtype]
    program: fx.GraphModule | None
    dtypes: tuple[torch.dtype, ...]


class _Prober:
    """Finds out what autocast, as it is, does to calls; equal calls are tried once."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[tuple[Any, ...], _Effect] = {}

    def effect(self, call: _Call) -> _Effect:
        """Return what autocast does to a call.

        Raises:
            CaptureError: The call cannot be traced, or gives another dtype than Dynamo saw.
        """
        blanks = [pytree.tree_map(_blank, value) for value in call.values]
        key = (call.node.op, call.node.target, repr(call.bind(blanks)), _state())
        if key not in self.known:
            self.known[key] = self._find(call, blanks)
        found, expected = self.known[key], call.node.meta.get(EXAMPLE)
        if expected is not None and _dtypes(expected) != found.dtypes:
            reason = f"traced alone it returns {found.dtypes}, in the model {_dtypes(expected)}"
            raise call.failure(reason)
        return found

    def _find(self, call: _Call, blanks: list[Any]) -> _Effect:
        inputs = [pytree.tree_map(self._fake, blank) for blank in blanks]
        try:
            traced = self._trace(call, inputs)
        except Exception as error:
            raise call.failure(error) from error
        (returned,) = next(iter(reversed(traced.graph.nodes))).args
        dtypes = _dtypes(pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, fx.Node) else n, returned))
        if self._plain_steps(call, inputs) == _steps(traced, {}):
            return _Effect({}, None, dtypes)
        casts, found = _input_casts(traced, inputs)
        cast_inputs = [v.to(casts[i]) if i in casts else v for i, v in enumerate(inputs)]
        if casts and self._plain_steps(call, cast_inputs) == _steps(traced, found):
            return _Effect(casts, None, dtypes)
        return _Effect({}, traced, dtypes)

    def _fake(self, blank: object) -> object:
        if not isinstance(blank, _Blank):
            return blank
        with self.mode:
            return torch.empty_strided(blank.shape, blank.stride, dtype=blank.dtype, device=blank.device)

    def _trace(self, call: _Call, inputs: list[Any]) -> fx.GraphModule:
        with self.mode:
            traced: fx.GraphModule = make_fx(call.run)(*inputs)
        return traced

    def _plain_steps(self, call: _Call, inputs: list[Any]) -> list[str] | None:
        """Return the call's steps without autocast; None where it needs autocast to fit its inputs together."""
        try:
            with without_autocast():
                return _steps(self._trace(call, inputs), {})
        except Exception:  # whatever it is, the call as it stands is no explanation
            return None


def _dtypes(values: Any) -> tuple[torch.dtype, ...]:
    return tuple(v.dtype for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))


def _input_casts(traced: fx.GraphModule, inputs: list[Any]) -> tuple[dict[int, torch.dtype], dict[fx.Node, fx.Node]]:
    """Return the dtype of each input that is used by nothing but one cast, and these casts with their inputs."""
    dtypes: dict[int, torch.dtype] = {}
    casts: dict[fx.Node, fx.Node] = {}
    placeholders = traced.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):  # one of them is a tuple
        return {}, {}
    for position, placeholder in enumerate(placeholders):
        user = next(iter(placeholder.users), None)
        if user and len(placeholder.users) == 1 and user.target is CAST and list(user.kwargs) == ["dtype"]:
            dtypes[position], casts[user] = user.meta["val"].dtype, placeholder
    return dtypes, casts


def _steps(traced: fx.GraphModule, left_out: Mapping[fx.Node, fx.Node]) -> list[str]:
    """Return a line for each node, free of the names; a node that is left out counts as the node that it maps to."""
    numbers: dict[fx.Node, str] = {}
    steps: list[str] = []
    for node in traced.graph.nodes:
        if node in left_out:
            numbers[node] = numbers[left_out[node]]
            continue
        numbers[node] = f"%{len(steps)}"
        target = "" if node.op in {"placeholder", "output"} else node.target
        steps.append(f"{node.op} {target} {fx.map_arg((node.args, node.kwargs), numbers.__getitem__)}")
    return steps


class _Applier:
    """Copies a graph node by node under the autocast state that each node has."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], prober: _Prober) -> None:
        self.gm, self.prober = gm, prober
        self.given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self.ambient, self.grad_enabled = _state_enabled(), torch.is_grad_enabled()
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
        call = _Call(node, self._value)
        if not any(_may_be_cast(v) for v in pytree.tree_leaves(call.values)):
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

    def _program(self, node: fx.Node, call: _Call, program: fx.GraphModule) -> fx.Node:
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
        bodies = [n for n in node.all_input_nodes if isinstance(self._attribute(n), fx.GraphModule)]
        if bodies and node.target is not CHECKPOINT and (self.ambient or self.regions):
            reason = "it calls subgraphs, and only those of activation checkpointing are supported"
            raise _Call(node, self._value).failure(reason)
        for body in bodies:
            gm = self._attribute(body)
            assert isinstance(gm, fx.GraphModule)
            if node.target is CHECKPOINT:
                values = [self._value(n) if isinstance(n, fx.Node) else n for n in node.args[1:]]
                gm = _Applier(gm, values, self.prober).run()
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

"""What autocast does to one call: found by tracing it with and without autocast, not looked up in a table.

    the traces are equal                      nothing
    equal, once these inputs are cast         casts of these inputs
    else (a bmm within einsum is cast)        the trace stands for the call

Traces are made of fake tensors below autograd and autocast, so they list the operators that run, casts among them.
A kernel that calls operators itself (bilinear's) is one step there: it keeps its inputs' precision inside, as under
``torch.compile``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxshard._torch import FakeTensorMode, make_fx
from fxshard.errors import CaptureError
from fxshard.passes.capture import concrete
from fxshard.passes.lower import without_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

log = logging.getLogger("fxshard")

CAST = torch.ops.aten._to_copy.default
DEVICES = ("cpu", "cuda")
EXAMPLE = "example_value"
"""The metadata key of the value that Dynamo saw."""


def autocast_enabled() -> bool:
    """Return whether autocast is on for a device."""
    return any(torch.is_autocast_enabled(device) for device in DEVICES)


def _state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


def may_be_cast(value: object) -> bool:
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


class Call:
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
class Effect:
    """What autocast does to a call.

    Args:
        casts: The dtype that it casts inputs to, by position.
        program: Stands for the whole call where casts of its inputs do not explain it.
        dtypes: Of the tensors that the call returns.
    """

    casts: Mapping[int, torch.dtype]
    program: fx.GraphModule | None
    dtypes: tuple[torch.dtype, ...]


class Prober:
    """Finds out what autocast, as it is, does to calls; equal calls are tried once."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[tuple[Any, ...], Effect] = {}

    def effect(self, call: Call) -> Effect:
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

    def _find(self, call: Call, blanks: list[Any]) -> Effect:
        inputs = [pytree.tree_map(self._fake, blank) for blank in blanks]
        try:
            traced = self._trace(call, inputs)
        except Exception as error:
            raise call.failure(error) from error
        (returned,) = next(iter(reversed(traced.graph.nodes))).args
        dtypes = _dtypes(pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, fx.Node) else n, returned))
        if self._plain_steps(call, inputs) == _steps(traced, {}):
            return Effect({}, None, dtypes)
        casts, found = _input_casts(traced, inputs)
        cast_inputs = [v.to(casts[i]) if i in casts else v for i, v in enumerate(inputs)]
        if casts and self._plain_steps(call, cast_inputs) == _steps(traced, found):
            return Effect(casts, None, dtypes)
        return Effect({}, traced, dtypes)

    def _fake(self, blank: object) -> object:
        if not isinstance(blank, _Blank):
            return blank
        with self.mode:
            return torch.empty_strided(blank.shape, blank.stride, dtype=blank.dtype, device=blank.device)

    def _trace(self, call: Call, inputs: list[Any]) -> fx.GraphModule:
        with self.mode:
            traced: fx.GraphModule = make_fx(call.run)(*inputs)
        return traced

    def _plain_steps(self, call: Call, inputs: list[Any]) -> list[str] | None:
        """Return the call's steps without autocast; None where it needs autocast to fit its inputs together."""
        try:
            with without_autocast(), _unlogged():
                traced = self._trace(call, inputs)
        except Exception:  # whatever it is, the call as it stands is no explanation
            log.debug("%s does not run without autocast", call, exc_info=True)
            return None
        return _steps(traced, {})


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep fake tensors from logging the calls that fail."""
    noisy = logging.getLogger(FakeTensorMode.__module__)
    before, noisy.disabled = noisy.disabled, True
    try:
        yield
    finally:
        noisy.disabled = before


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
        if user and len(placeholder.users) == 1 and _is_plain_cast(user, placeholder):
            dtypes[position], casts[user] = user.meta["val"].dtype, placeholder
    return dtypes, casts


def _is_plain_cast(node: fx.Node, placeholder: fx.Node) -> bool:
    if node.target is not CAST or "memory_format" in node.kwargs:
        return False
    before, after = placeholder.meta["val"], node.meta["val"]
    return bool((before.device, before.layout) == (after.device, after.layout))


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

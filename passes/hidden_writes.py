"""Hidden writes: values that are written where autograd does not look, while a model is captured.

A functional graph knows values and no tensors that are written, so a tensor's history gets lost with its old value::

    with torch.no_grad(): w.mul_(mask)          _set_grad_enabled(False); new = mul(w, mask)
    y = conv(x, w)                              y = conv(x, new)                 no gradient reaches w

    after:                                      renew = fxshard.renew(w, new);  y = conv(x, renew)

Capture runs the model twice.  The first run has autograd's own versions and bases of every tensor: a write is *hidden*
from a tensor that needs a gradient if it happened in ``no_grad`` or through a detached alias.  The second run makes
the graph, and each value that was hidden there is :mod:`renewed <fxshard.ops.renew>`.  A write that autograd records
is in the graph with its history; the capture only says which inputs it reached.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard._torch import set_grad_enabled
from fxshard.provenance import all_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

RENEW = torch.ops.fxshard.renew.default
aten = torch.ops.aten


@dataclass(frozen=True)
class _Place:
    """Where a running graph has a tensor: the nesting of the graph, the node, and which of its results."""

    level: int
    node: fx.Node
    item: int
    is_view: bool


class HiddenWrites:
    """Watches the runs of one capture.

    Args:
        gm: The Dynamo graph that is captured.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.recorded: set[int] = set()
        """The inputs that have a new history, because autograd recorded that they were written."""
        self._active = torch.is_grad_enabled() or _enables_gradients(gm)
        self._runs = 0
        self._step = 0
        self._inputs: Sequence[object] = ()
        self._running: list[fx.Interpreter] = []
        self._hidden: dict[int, list[_Place]] = {}

    def begin(self, inputs: Sequence[object]) -> None:
        """Begin a run of the graph with these inputs."""
        self._inputs, self._step = inputs, 0
        self._runs += 1

    @contextmanager
    def inside(self, interpreter: fx.Interpreter) -> Iterator[None]:
        """Run a graph, or one that is nested in it.

        Args:
            interpreter: Has the values of its nodes, as long as they are needed.
        """
        self._running.append(interpreter)
        try:
            yield
        finally:
            self._running.pop()

    def around(self, arguments: object) -> AbstractContextManager[None]:
        """Return a context to run one call in.

        Args:
            arguments: What it is called with.
        """
        step, self._step = self._step, self._step + 1
        if not self._active:
            return nullcontext()
        if self._runs == 1:
            return self._observed(step, [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)])
        return self._renewed(self._hidden.get(step, ()))

    @contextmanager
    def _observed(self, step: int, tensors: Sequence[Tensor]) -> Iterator[None]:
        before = [(tensor, tensor._version, _history(tensor)) for tensor in tensors]
        yield
        written = [(tensor, history) for tensor, version, history in before if tensor._version > version]
        if written:
            seen = {id(_base(tensor)) for tensor, history in written if _history(tensor) is not history}
            self._note(step, {_storage(tensor) for tensor, _ in written}, seen)

    @contextmanager
    def _renewed(self, places: Sequence[_Place]) -> Iterator[None]:
        before = [self._copy(place) for place in places]
        yield
        for place, old in zip(places, before, strict=True):
            value = self._value(place)
            with _recording():
                value.copy_(RENEW(old, value))

    def _note(self, step: int, storages: set[int], seen: set[int]) -> None:
        """Note what a call wrote.

        Args:
            step: The number of the call.
            storages: What memory was written.
            seen: The bases whose history has changed.
        """
        for number, value in enumerate(self._inputs):
            if _reached(value, storages) and id(_base(value)) in seen:
                self.recorded.add(number)
        found: dict[int, tuple[_Place, Tensor]] = {}
        for place, value in self._live():
            if _reached(value, storages) and id(_base(value)) not in seen:
                found.setdefault(id(value), (place, value))
        hidden = [place for place, value in found.values() if value._base is None or id(value._base) not in found]
        if hidden:
            self._hidden[step] = hidden

    def _live(self) -> Iterator[tuple[_Place, Tensor]]:
        for level, interpreter in enumerate(self._running):
            for node, held in interpreter.env.items():
                for item, value in enumerate(tree_leaves(held)):
                    if isinstance(value, torch.Tensor):
                        yield _Place(level, node, item, value._is_view()), value

    def _value(self, place: _Place) -> Tensor:
        value = tree_leaves(self._running[place.level].env[place.node])[place.item]
        assert isinstance(value, torch.Tensor)
        return value

    def _copy(self, place: _Place) -> Tensor:
        """Return a handle of a value before it is written; a view is taken anew, which has to be differentiable."""
        with _recording() if place.is_view else nullcontext():
            return self._value(place).clone()


def remove_copies(gm: fx.GraphModule) -> None:
    """Let renewed values stand for themselves: a functional graph needs no copy of a value to remember it.

    Args:
        gm: A captured graph, whose ``renew`` calls read copies of the old values and are copied to the new ones.
    """
    for node in gm.graph.find_nodes(op="call_function", target=RENEW):
        (old, _) = node.args
        assert old.target is aten.clone.default
        node.update_arg(0, old.args[0])
        if not old.users:
            gm.graph.erase_node(old)
        for user in list(node.users):
            if user.target is aten.copy.default and user.args[1] is node:
                user.replace_all_uses_with(node)
                gm.graph.erase_node(user)


def _enables_gradients(gm: fx.GraphModule) -> bool:
    return any(node.target is set_grad_enabled and node.args[0] for node in all_nodes(gm))


def _recording() -> AbstractContextManager[Any]:
    """Return a context with gradients, which leaves no trace in the graph where they are on."""
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def _reached(value: object, storages: set[int]) -> TypeGuard[Tensor]:
    """Return whether a value needs a gradient and is in memory that was written."""
    return isinstance(value, torch.Tensor) and value.requires_grad and _storage(value) in storages


def _base(tensor: Tensor) -> Tensor:
    """Return the tensor that autograd keeps the history of a view in."""
    return tensor if tensor._base is None else tensor._base


def _history(tensor: Tensor) -> Any:
    """Return how autograd knows a tensor to be made; in no_grad it does not change, and may not be asked for."""
    return tensor.grad_fn if torch.is_grad_enabled() else None


def _storage(tensor: Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata

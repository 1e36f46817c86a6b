"""One operator call of the global graph, as a rule sees it: arguments by schema name, tensors in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def _tensors(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _replaced(value: object, replacements: Iterator[object]) -> object:
    if isinstance(value, Node):
        return next(replacements)
    if isinstance(value, (list, tuple)):
        return [_replaced(item, replacements) for item in value]
    return value


@dataclass(frozen=True)
class OpCall:
    """A call of an ATen operator on global tensors.

    Args:
        node: A ``call_function`` node whose target is an ``OpOverload``.
    """

    node: Node

    @property
    def op(self) -> torch._ops.OpOverload:
        """The exact overload."""
        target = self.node.target
        assert isinstance(target, torch._ops.OpOverload)
        return target

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument by its schema name, defaults included."""
        schema = self.op._schema.arguments
        positional = [a for a in schema if not a.kwarg_only]
        bound = {a.name: a.default_value for a in schema if a.has_default_value()}
        bound |= {a.name: v for a, v in zip(positional, self.node.args, strict=False)}
        bound |= self.node.kwargs
        return {a.name: bound.get(a.name) for a in schema}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The tensor inputs in schema order, tensor lists flattened."""
        return tuple(_tensors(list(self.arguments.values())))

    @cached_property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """For each argument that holds tensors, their positions in :attr:`inputs`."""
        found: dict[str, tuple[int, ...]] = {}
        start = 0
        for name, value in self.arguments.items():
            count = sum(1 for _ in _tensors(value))
            if count:
                found[name] = tuple(range(start, start + count))
            start += count
        return found

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """Return the global shape of one tensor input."""
        return tuple(tensor_value(self.inputs[position]).shape)

    @cached_property
    def output_values(self) -> tuple[torch.Tensor | None, ...]:
        """The fake values of the outputs, global; None for an output that is no tensor."""
        value = self.node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(v if isinstance(v, torch.Tensor) else None for v in values)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The global shape of the first output."""
        value = self.output_values[0]
        assert value is not None
        return tuple(value.shape)

    def rebind(self, inputs: Sequence[object], **overrides: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with the tensors replaced in order and some arguments by name.

        Args:
            inputs: One value for each of :attr:`inputs`.
            overrides: Arguments by schema name that replace what the call has; they hold no graph nodes
                of the global graph.
        """
        replacements = iter(inputs)
        bound = {name: _replaced(value, replacements) for name, value in self.arguments.items()}
        bound |= overrides
        schema = self.op._schema.arguments
        args = tuple(bound[a.name] for a in schema if not a.kwarg_only)
        return args, {a.name: bound[a.name] for a in schema if a.kwarg_only and bound[a.name] is not None}

"""The rule interface: what an operator does with a split input, one mesh axis at a time.

A rule answers, for one mesh axis, *given the placements that the inputs have*, with one of::

    Row(inputs, outputs)   bring the inputs to these placements and run; the outputs are placed like this
    Expand(program)        replace the call by this program of simpler operators and plan those
    Gather(reason)         replicate on this axis; the plan records the reason

and says how to emit the local program of one rank once all axes are decided (default: the same
operator on the local tensors).  Axes are independent, so a row on each axis composes: a convolution
split over H on one axis and over W on another is two rows and one local convolution.

Rules are registered for exact overloads with :func:`rule`; registering twice raises.  Operators that
torch tags as pointwise share one rule, registered for the tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fxshard.errors import FxShardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.layout import Placement, Shard
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan


@dataclass(frozen=True)
class Row:
    """One admissible placement on one axis.

    Args:
        inputs: What each tensor input has to be brought to, in schema order.
        outputs: How each output is placed.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Expand:
    """Plan this program in place of the call.

    Args:
        program: A function of the call's arguments (same names and order as the schema) on global
            tensors, written in functional torch code.
    """

    program: Callable[..., Any]


@dataclass(frozen=True)
class Gather:
    """Replicate on this axis.

    Args:
        reason: Why, for the plan.
    """

    reason: str


Choice: TypeAlias = Row | Expand | Gather
Place: TypeAlias = "Callable[[OpCall, tuple[Placement, ...]], Choice]"
SplitAs: TypeAlias = "Callable[[OpCall, tuple[Placement, ...], Shard], Row | None]"
Emit: TypeAlias = "Callable[[Emitter, OpCall, NodePlan, Sequence[Node]], Node | tuple[Node, ...]]"


def emit_same(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit the same operator on the local tensors."""
    args, kwargs = call.rebind(inputs)
    return emitter.call(call.op, *args, **kwargs)


@dataclass(frozen=True)
class Rule:
    """How one operator is placed and emitted.

    Args:
        place: The row, expansion or gather for one axis.
        emit: The local program.
        nested: Whether the rule is right when two axes split the same dimension.
        always: Whether ``place`` is asked although every input is replicated.
        enters: Whether the operator is worth splitting a replicated map for: its first input is the image.
        whole_gradients: Whether a replicated input's gradient is whole although the work is split.
        split_as: How a whole result is made in parts: the row for one axis, given where the inputs are, or None.
    """

    place: Place
    emit: Emit = emit_same
    nested: bool = False
    always: bool = False
    enters: bool = False
    whole_gradients: bool = False
    split_as: SplitAs | None = None


_RULES: dict[torch._ops.OpOverload | torch.Tag, Rule] = {}


def rule(
    *ops: torch._ops.OpOverload | torch.Tag,
    emit: Emit = emit_same,
    nested: bool = False,
    always: bool = False,
    enters: bool = False,
    whole_gradients: bool = False,
    split_as: SplitAs | None = None,
) -> Callable[[Place], Place]:
    """Register the decorated function as the placement rule of ``ops``.

    Args:
        ops: Exact overloads; a tag stands for every functional operator that torch gives it and that has no
            rule of its own.
        emit: The local program, see :class:`Rule`.
        nested: Whether two axes may split the same dimension.
        always: Whether to ask although every input is replicated.
        enters: Whether to split a replicated map again for this operator.
        whole_gradients: Whether the gradients of replicated inputs need no sum over the ranks.
        split_as: How a whole result is made in parts.

    Raises:
        FxShardError: An operator has a rule already.
    """

    def register(place: Place) -> Place:
        for op in ops:
            if op in _RULES:
                msg = f"{op} has a rule already ({_RULES[op].place.__module__}); an operator has one rule"
                raise FxShardError(msg)
            _RULES[op] = Rule(place, emit, nested, always, enters, whole_gradients, split_as)
        return place

    return register


def find_rule(op: object) -> Rule | None:
    """Return the rule of an overload, the pointwise rule where torch tags it so, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if op in _RULES or op._schema.is_mutable:
        return _RULES.get(op)
    return next((_RULES[tag] for tag in op.tags if tag in _RULES), None)


def registered() -> dict[torch._ops.OpOverload | torch.Tag, Rule]:
    """Return the registry: the page of supported operators is made from it, and tests take rules out of it."""
    return _RULES

"""Moving positions: roll, flip and rotation; and masks that know where a position is.

The bounds stay as they are, so that the result meets what it is added to; the window moves::

    roll by s    out[i] = x[(i - s) mod size]      window of [lo, hi): [lo - s, hi - s), wrapped around
    flip         out[i] = x[size - 1 - i]          window of [lo, hi): [size - hi, size - lo), then flipped
    tril(k)      keeps column <= row + k           local rows from r0, columns from c0: k + r0 - c0
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Fill, Placement, Shard, Window
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import holding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten


def rolled_window(bounds: Sequence[int], shift: int) -> Window:
    """Return what each rank needs to have its part of a dimension that is rolled by ``shift``.

    Example:
        >>> rolled_window((0, 4, 8), 1).intervals
        ((-1, 3), (3, 7))
    """
    shift %= bounds[-1]
    pairs = itertools.pairwise(bounds)
    return Window(tuple((lo - shift, hi - shift) for lo, hi in pairs), Fill("circular"))


def mirrored_window(bounds: Sequence[int]) -> Window:
    """Return what each rank needs, unflipped, to have its part of a flipped dimension.

    Example:
        >>> mirrored_window((0, 3, 8)).intervals
        ((5, 8), (0, 5))
    """
    size = bounds[-1]
    return Window(tuple((size - hi, size - lo) for lo, hi in itertools.pairwise(bounds)))


def _shifts(call: OpCall) -> dict[int, int]:
    """Return by how much each dimension is rolled; a dimension that is named twice is rolled by both."""
    found: dict[int, int] = {}
    for dim, shift in zip(call["dims"], call["shifts"], strict=True):
        found[dim % len(call.shape(0))] = found.get(dim % len(call.shape(0)), 0) + shift
    return found


@rule(aten.roll.default, emit=lambda *a: _emit_roll(*a), nested=True)
def place_roll(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch the window from where the columns come."""
    (shard,) = at
    assert isinstance(shard, Shard)
    if not call["dims"]:
        return Expand(_roll_flat)
    shift = _shifts(call).get(shard.dim, 0)
    if shift % (shard.size * shard.outer) == 0:
        return Row(at, at)
    if shard.outer != 1:
        return Gather("the split dimension is a flattened one")
    return Row((holding(shard, rolled_window(shard.bounds, shift)),), at)


def _roll_flat(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    return x.reshape(-1).roll(shifts, (0,)).reshape(x.shape)


def _emit_roll(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    split = {p.dim for p in plan.inputs[0] if isinstance(p, Shard)}
    local = {dim: shift for dim, shift in _shifts(call).items() if dim not in split}
    return emitter.call(aten.roll.default, inputs[0], list(local.values()), list(local)) if local else inputs[0]


@rule(aten.flip.default, nested=True)
def place_flip(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch the mirrored window and flip it."""
    (shard,) = at
    assert isinstance(shard, Shard)
    if shard.dim not in {d % len(call.shape(0)) for d in call["dims"]}:
        return Row(at, at)
    if shard.outer != 1:
        return Gather("the split dimension is a flattened one")
    return Row((holding(shard, mirrored_window(shard.bounds)),), at)


@rule(aten.rot90.default, nested=True)
def place_rotation(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Rewrite quarter turns as flips and a transposition."""
    return Expand(_rotated)


def _rotated(x: Tensor, k: int, dims: Sequence[int]) -> Tensor:
    first, second = dims
    turns = k % 4
    if turns == 0:
        return x.clone()
    if turns == 2:
        return x.flip((first, second))
    return x.flip((second,)).transpose(first, second) if turns == 1 else x.transpose(first, second).flip((second,))


@rule(aten.tril.default, aten.triu.default, emit=lambda *a: _emit_triangle(*a), nested=True)
def place_triangle(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep the split; the diagonal moves with a rank's first row and column."""
    (shard,) = at
    assert isinstance(shard, Shard)
    if shard.outer != 1 and shard.dim >= len(call.shape(0)) - 2:
        return Gather("the split dimension is a flattened one")
    return Row(at, at)


def _emit_triangle(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    rows, diagonal = len(call.shape(0)) - 2, int(call["diagonal"])
    for axis, shard in enumerate(plan.inputs[0]):
        if isinstance(shard, Shard) and shard.dim >= rows:
            first: Any = shard.bounds[emitter.rank.coords[axis]]
            diagonal += first if shard.dim == rows else -first
    return emitter.call(call.op, inputs[0], diagonal)

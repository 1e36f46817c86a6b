"""Joining: concatenation, stacking and repetition.

Along other dimensions than the split one the inputs are brought to one split, the largest's.  Along the split
dimension a rank's part of the output overlaps some inputs and not others; it fetches what it needs of each and
joins that::

    inputs      |--- a ---|-------- b --------|- c -|
    output      |   rank 0     |   rank 1     |rank 2        here the bounds follow b, the largest
    rank 0       all of a, 0:5 of b,  nothing of c
    rank 1                   5:9 of b,  nothing of a and c

Every rank takes part in the exchange of every input.  A whole input is cut where it is needed; its gradient is
summed.  A repetition is one exchange whose window wraps around.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Fill, Interval, Placement, Shard, Window, even_bounds, spread_bounds
from fxshard.rules.rule import Choice, Gather, Row, rule
from fxshard.rules.slicing import balanced, covering, split_axis, splittable, trimmed
from fxshard.rules.stencil import holding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten


def _largest(call: OpCall, at: Sequence[Placement]) -> tuple[int, Shard]:
    """Return the position and the split of the largest split input."""
    splits = [(math.prod(call.shape(i)), i, p) for i, p in enumerate(at) if isinstance(p, Shard)]
    _, position, shard = max(splits, key=lambda item: item[0])
    return position, shard


def _dim_of(call: OpCall) -> int:
    return int(call["dim"] % len(call.out_shape))


def overlaps(sizes: Sequence[int], bounds: Sequence[int], position: int) -> list[Interval]:
    """Return for each rank which part of one input its part of the concatenation holds, possibly empty.

    Args:
        sizes: The inputs' sizes along the dimension.
        bounds: How their concatenation is split.
        position: Which input.

    Example:
        >>> overlaps((2, 6), (0, 5, 8), 0), overlaps((2, 6), (0, 5, 8), 1)
        ([(0, 2), (2, 2)], [(0, 3), (3, 6)])
    """
    start, size = sum(sizes[:position]), sizes[position]
    ends = [min(max(b - start, 0), size) for b in bounds]
    return list(itertools.pairwise(ends))


def joined_bounds(sizes: Sequence[int], position: int, bounds: Sequence[int]) -> tuple[int, ...] | None:
    """Return how a concatenation is split: as its input at ``position`` is, unless that is unequal.

    Args:
        sizes: The inputs' sizes along the dimension.
        position: The input whose columns stay where they are.
        bounds: Its split.

    Returns:
        Bounds that leave no rank empty, or None where there are fewer columns than ranks.

    Example:
        >>> joined_bounds((1, 8, 1), 1, (0, 4, 8)), joined_bounds((8, 8), 0, (0, 4, 8))
        ((0, 5, 10), (0, 8, 16))
    """
    start = sum(sizes[:position])
    spread = spread_bounds((0, *(start + b for b in bounds[1:-1]), sum(sizes)))
    return None if spread is None else balanced(spread)


@rule(aten.cat.default, emit=lambda *a: _emit_cat(*a), nested=True)
def place_cat(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Bring all inputs to the split of the largest, or fetch each rank's part of each."""
    position, lead = _largest(call, at)
    dim = _dim_of(call)
    if any(len(call.shape(i)) != len(call.out_shape) for i in range(len(at))):
        return Gather("an input has fewer dimensions than the result")
    if lead.dim != dim:
        return Row((lead,) * len(at), (lead,))
    if lead.outer != 1:
        return Gather("the split dimension is a flattened one")
    sizes = [call.shape(i)[dim] for i in range(len(at))]
    bounds = joined_bounds(sizes, position, lead.bounds)
    if bounds is None:
        return Gather(f"{sum(sizes)} columns for {lead.ranks} ranks")
    wanted = [splittable(p, dim, size, lead.ranks) for p, size in zip(at, sizes, strict=True)]
    wanted = [covering(p, overlaps(sizes, bounds, i)) if isinstance(p, Shard) else p for i, p in enumerate(wanted)]
    return Row(tuple(wanted), (Shard(dim, bounds),))


def _emit_cat(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dim = _dim_of(call)
    axis = split_axis(plan.outputs[0].axes, dim)
    if axis is None:
        return emitter.call(aten.cat.default, list(inputs), dim)
    shard = plan.outputs[0][axis]
    assert isinstance(shard, Shard)
    sizes = [call.shape(i)[dim] for i in range(len(inputs))]
    needed = [overlaps(sizes, shard.bounds, i) for i in range(len(inputs))]
    parts = [
        trimmed(emitter, x, axis, layout[axis], part, dim)
        for x, layout, part in zip(inputs, plan.inputs, needed, strict=True)
    ]
    return emitter.call(aten.cat.default, parts, dim)


@rule(aten.stack.default, nested=True)
def place_stack(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Bring all inputs to one split; the new dimension is never split."""
    _, lead = _largest(call, at)
    shifted = Shard(lead.dim + (lead.dim >= _dim_of(call)), lead.bounds, lead.outer)
    return Row((lead,) * len(at), (shifted,))


@rule(aten.repeat.default, emit=lambda *a: _emit_repeat(*a), nested=True)
def place_repeat(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch a window that wraps around where the split dimension is repeated."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim = shard.dim + len(call.out_shape) - len(call.shape(0))
    times = call["repeats"][dim]
    if times == 1:
        return Row(at, (Shard(dim, shard.bounds, shard.outer),))
    if shard.outer != 1 or times == 0:
        return Gather("the split dimension is a flattened one" if times else "nothing is left of the split dimension")
    bounds = even_bounds(times * shard.size, shard.ranks)
    window = Window(tuple(itertools.pairwise(bounds)), Fill("circular"))
    return Row((holding(shard, window),), (Shard(dim, bounds),))


def _emit_repeat(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    split = {p.dim for p in plan.outputs[0] if isinstance(p, Shard)}
    repeats = [1 if d in split else times for d, times in enumerate(call["repeats"])]
    return emitter.call(aten.repeat.default, inputs[0], repeats)

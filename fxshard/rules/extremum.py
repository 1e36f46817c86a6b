"""Maxima and minima: value, gradient and position are those of the whole tensor.

    amax      m = max_r m_r.  The gradient is shared evenly by the global ties, so a rank whose local maximum has
              c_r ties passes on the part c_r / sum_r c_r of it (over the ranks with m_r = m)
    max.dim   the winner is the tie with the lowest global index; the gradient is its alone

One small gather brings (m_r, c_r), or (m_r, index_r), of every rank to every rank::

    rank 0   m_0 = 5  c_0 = 2
    rank 1   m_1 = 5  c_1 = 1      ->   m = 5, gradient 2/3 to rank 0's maximum and 1/3 to rank 1's
    rank 2   m_2 = 4  c_2 = 9

NaN wins, as in ATen.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Placement, Replicate
from fxshard.rules.reduce import (
    LOW_PRECISION,
    local_reduction,
    named_dims,
    rank_table,
    reduced_axes,
    reduced_dims,
)
from fxshard.rules.rule import Choice, Expand, Row, rule
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.layout import Layout
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
REDUCTIONS = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}
"""For a reduction with positions, the one without."""
NO_POSITION = torch.iinfo(torch.int64).max


@rule(aten.amax.default, aten.amin.default, emit=lambda *a: _emit_extremum(*a), nested=True)
def place_extremum(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take the extremum of the ranks' extrema."""
    return local_reduction(call, at) or Row(at, (Replicate(),))


def _emit_extremum(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dims, keepdim = list(reduced_dims(call)), bool(call["keepdim"])
    axes = reduced_axes(plan.inputs[0], dims)
    if not axes or not _differentiable(call):
        found = emitter.call(call.op, inputs[0], dims, keepdim)
        for axis, shard in axes:
            found = emitter.call(call.op, rank_table(emitter, found, axis, shard.ranks), [0])
        return found
    kept = emitter.call(call.op, inputs[0], dims, True)
    ties = emitter.call(aten.eq.Tensor, inputs[0], emitter.call(aten.detach.default, kept))
    dtype = tensor_value(kept).dtype
    counted_in = torch.float32 if dtype in LOW_PRECISION else dtype
    count = emitter.call(aten.sum.dim_IntList, ties, dims, True, dtype=counted_in)
    found = emitter.call(aten.to.dtype, kept, counted_in)
    for axis, shard in axes:
        found, count = _merge_extremum(emitter, call, (found, count), axis, shard.ranks)
    found = emitter.call(aten.to.dtype, found, dtype)
    return found if keepdim else emitter.call(aten.squeeze.dims, found, dims)


def _differentiable(call: OpCall) -> bool:
    value = tensor_value(call.inputs[0])
    return value.is_floating_point() and call.inputs[0].target is not aten.detach.default


def _merge_extremum(
    emitter: Emitter, call: OpCall, local: tuple[Node, Node], axis: int, ranks: int
) -> tuple[Node, Node]:
    """Merge (extremum, ties) over the ranks of one axis: exact value, gradient in proportion to the ties."""
    table = rank_table(emitter, emitter.call(aten.stack.default, list(local), 0), axis, ranks)
    found, ties = (emitter.call(aten.select.int, table, 1, i) for i in (0, 1))
    best = emitter.call(call.op, emitter.call(aten.detach.default, found), [0])
    loses = emitter.call(aten.ne.Tensor, found, best)
    count = emitter.call(aten.masked_fill.Scalar, emitter.call(aten.detach.default, ties), loses, 0)
    total = emitter.call(aten.sum.dim_IntList, count, [0])
    shares = emitter.call(aten.div.Tensor, count, total)  # NaN where the extremum is NaN, which nothing equals
    passed_by = emitter.call(aten.logical_and.default, loses, emitter.call(aten.eq.Tensor, best, best))
    terms = emitter.call(aten.masked_fill.Scalar, found, passed_by, 0)  # a NaN gives all ranks its gradient, a NaN
    value = emitter.call(aten.sum.dim_IntList, emitter.call(aten.mul.Tensor, terms, shares), [0])
    return _with_value(emitter, value, best), total


def _with_value(emitter: Emitter, x: Node, value: Node) -> Node:
    """Emit ``value`` with the gradient of ``x``, which equals it but for rounding."""
    rounding = emitter.call(aten.sub.Tensor, value, emitter.call(aten.detach.default, x))
    infinite = emitter.call(aten.isinf.default, value)
    return emitter.call(aten.add.Tensor, x, emitter.call(aten.masked_fill.Scalar, rounding, infinite, 0))


@rule(aten.max.dim, aten.min.dim, emit=lambda *a: _emit_with_position(*a), nested=True)
def place_with_position(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take the winner of the ranks' winners, with its global index."""
    return local_reduction(call, at) or Row(at, (Replicate(), Replicate()))


def _emit_with_position(
    emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]
) -> Node | tuple[Node, ...]:
    dim, keepdim = reduced_dims(call)[0], bool(call["keepdim"])
    axes = reduced_axes(plan.inputs[0], [dim])
    if not axes:
        return emitter.call(call.op, inputs[0], dim, keepdim)
    found = emitter.call(call.op, inputs[0], dim, True)
    values, indices = (emitter.call(operator.getitem, found, i) for i in (0, 1))
    indices = global_positions(emitter, indices, plan.inputs[0], dim, call.shape(0)[dim])
    for axis, shard in axes:
        tables = (rank_table(emitter, x, axis, shard.ranks) for x in (values, indices))
        pair = winner(emitter, REDUCTIONS[call.op], *tables, dim=0)
        values, indices = (emitter.call(aten.select.int, x, 0, 0) for x in pair)
    if keepdim:
        return values, indices
    return emitter.call(aten.squeeze.dim, values, dim), emitter.call(aten.squeeze.dim, indices, dim)


def owned_positions(layout: Layout, dim: int, size: int, coords: Sequence[int]) -> list[int]:
    """Return the global positions of what the rank at ``coords`` has of a dimension, in order.

    Args:
        layout: The tensor's layout.
        dim: The dimension.
        size: Its global size.
        coords: The rank's coordinate on each mesh axis.

    Example:
        >>> from fxshard.layout import Layout, Shard
        >>> owned_positions(Layout((Shard(0, (0, 1, 3), outer=2),)), 0, 6, (1,))
        [1, 2, 4, 5]
    """
    positions = list(range(size))
    for axis, shard in layout.shards(dim):
        lo, hi = shard.interval(coords[axis])
        positions = [p for i, p in enumerate(positions) if lo <= i % shard.size < hi]
    return positions


def global_positions(emitter: Emitter, indices: Node, layout: Layout, dim: int, size: int) -> Node:
    """Emit the global positions of local ``indices`` into a dimension that is split."""
    positions = owned_positions(layout, dim, size, emitter.rank.coords)
    shards = layout.shards(dim)
    if len(shards) == 1 and shards[0][1].outer == 1:
        return emitter.call(aten.add.Scalar, indices, positions[0])
    table = emitter.constant(indices, positions, -1)
    return emitter.call(aten.index.Tensor, table, [indices])


def winner(emitter: Emitter, reduction: Any, values: Node, indices: Node, *, dim: int) -> tuple[Node, Node]:
    """Emit the extremum along ``dim`` that has the lowest index, and that index; ``dim`` keeps the size 1.

    Args:
        emitter: Where to.
        reduction: ``aten.amax.default`` or ``aten.amin.default``.
        values: The candidates; the gradient goes to the winner.
        indices: Their positions, int64.
        dim: The dimension of the candidates.
    """
    best = emitter.call(reduction, emitter.call(aten.detach.default, values), [dim], True)
    equal = emitter.call(aten.eq.Tensor, values, best)
    wins = emitter.call(aten.logical_or.default, equal, emitter.call(aten.isnan.default, values))
    lowest = emitter.call(aten.where.ScalarOther, wins, indices, NO_POSITION)
    choice = emitter.call(aten.argmin.default, lowest, dim, True)
    return emitter.call(aten.gather.default, values, dim, choice), emitter.call(
        aten.gather.default, indices, dim, choice
    )


@rule(aten.max.default, aten.min.default, nested=True)
def place_whole_extremum(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Reduce every dimension."""
    reduction = torch.amax if call.op is aten.max.default else torch.amin
    return Expand(lambda x: reduction(x, list(range(x.ndim))))


@rule(aten.aminmax.default, nested=True)
def place_both(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take one extremum after the other."""

    def program(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        dims = named_dims(x, dim)
        return x.amin(dims, keepdim), x.amax(dims, keepdim)

    return local_reduction(call, at) or Expand(program)


@rule(aten.argmax.default, aten.argmin.default, nested=True)
def place_position(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep the position of the winner; that of a flat tensor where no dimension is named."""
    reduction = torch.max if call.op is aten.argmax.default else torch.min

    def program(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            return reduction(x, dim, keepdim).indices
        position = reduction(x.reshape(-1), 0).indices
        return position.reshape([1] * x.ndim) if keepdim else position

    return local_reduction(call, at) or Expand(program)


@rule(
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    nested=True,
)
def place_truth(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take the extremum of what is true."""
    reduction = torch.amax if call.op._overloadpacket is aten.any else torch.amin
    value = call.output_values[0]
    assert value is not None
    dtype, dims = value.dtype, list(reduced_dims(call))

    def program(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return reduction(x if x.dtype == torch.bool else x != 0, dims, keepdim).to(dtype)

    return local_reduction(call, at) or Expand(program)

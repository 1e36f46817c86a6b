r"""Adaptive pooling: bin o of O covers ``[floor(o*S/O), ceil((o+1)*S/O))`` of S positions.

::

    S = 7, O = 3       bins   |0 1 2|
                                  |2 3 4|
                                      |4 5 6|          rank 0 has 0..3, rank 1 has 4..6

average   one bin is a mean.  Else the bins are rows of a matrix, and a rank contributes the columns that it owns
          -> Partial(sum)
maximum   one bin is a maximum with its position.  Else each rank takes the maximum of what it has of every bin
          (-inf where it has nothing), and the winner of the ranks' winners is taken, as in
          :mod:`fxshard.rules.extremum`; the gradient is the winner's alone
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Partial, Placement, Replicate, Shard
from fxshard.rules.extremum import NO_POSITION, owned_positions, winner
from fxshard.rules.pool import Frame, global_flat
from fxshard.rules.reduce import LOW_PRECISION, rank_table
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
AVG_POOLS = {
    aten.adaptive_avg_pool1d.default: 1,
    aten.adaptive_avg_pool2d.default: 2,
    aten.adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
}
MAX_POOLS = {aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3}


@rule(*AVG_POOLS, emit=lambda *a: _emit_adaptive(*a))
def place_adaptive_pool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave a split batch or channel; average the whole dimension, or contribute to the bins."""
    (image,) = at
    assert isinstance(image, Shard)
    rank, dims = len(call.shape(0)), AVG_POOLS[call.op]
    if image.dim < rank - dims:
        return Row((image,), (image,))
    if image.outer != 1:
        return Gather("the split dimension is a flattened one")
    if all(size == 1 for size in call.out_shape[rank - dims :]):
        return Expand(_global_mean(dims))
    value = call.output_values[0]
    if value is not None and value.dtype in LOW_PRECISION:
        return Expand(_adaptive_in_float32(call.op))
    if call.out_shape[image.dim] == call.shape(0)[image.dim]:
        return Row((image,), (image,))
    return Row((image,), (Partial(),))


def _global_mean(dims: int) -> Any:
    def program(x: Tensor, output_size: Sequence[int]) -> Tensor:
        return x.mean(list(range(x.ndim - dims, x.ndim)), keepdim=True)

    return program


def _adaptive_in_float32(op: torch._ops.OpOverload) -> Any:
    def program(x: Tensor, output_size: Sequence[int]) -> Tensor:
        return op(x.float(), output_size).to(x.dtype)

    return program


def bin_weights(size: int, bins: int, lo: int, hi: int) -> list[list[float]]:
    """Return the adaptive pool's matrix, one row a bin, for input positions ``[lo, hi)``.

    Example:
        >>> bin_weights(3, 2, 0, 3)
        [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    edges = [(b * size // bins, -(-(b + 1) * size // bins)) for b in range(bins)]
    return [[1 / (end - start) if start <= i < end else 0.0 for i in range(lo, hi)] for start, end in edges]


def _emit_adaptive(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit the bins of the split dimensions as products, then the operator on the others."""
    y, rank, dims = inputs[0], len(call.shape(0)), AVG_POOLS[call.op]
    sizes = list(call.out_shape[rank - dims :])
    for axis, shard in enumerate(plan.inputs[0]):
        if isinstance(shard, Shard) and shard.dim >= rank - dims:
            if isinstance(plan.outputs[0][axis], Partial):
                y = _binned(emitter, call, y, shard, shard.interval(emitter.rank.coords[axis]))
            else:
                sizes[shard.dim - rank + dims] = shard.length(emitter.rank.coords[axis])
    return emitter.call(call.op, y, sizes)


def _binned(emitter: Emitter, call: OpCall, x: Node, shard: Shard, interval: tuple[int, int]) -> Node:
    weights = bin_weights(call.shape(0)[shard.dim], call.out_shape[shard.dim], *interval)
    matrix = emitter.constant(x, weights, -2)
    moved = emitter.call(aten.transpose.int, x, shard.dim, -1)
    product = emitter.call(aten.matmul.default, moved, emitter.call(aten.t.default, matrix))
    return emitter.call(aten.transpose.int, product, shard.dim, -1)


@rule(*MAX_POOLS, emit=lambda *a: _emit_adaptive_max(*a))
def place_adaptive_max(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave a split batch or channel; take the whole maximum, or the winner of each bin over the ranks."""
    (image,) = at
    assert isinstance(image, Shard)
    rank, dims = len(call.shape(0)), MAX_POOLS[call.op]
    if image.dim < rank - dims:
        return Row((image,), (image, image))
    if image.outer != 1:
        return Gather("the split dimension is a flattened one")
    if all(size == 1 for size in call.out_shape[rank - dims :]):
        return Expand(_global_max(dims))
    return Row((image,), (Replicate(), Replicate()))


def _global_max(dims: int) -> Any:
    def program(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
        values, positions = x.flatten(-dims).max(-1)
        shape = (*values.shape, *(1,) * dims)
        return values.reshape(shape), positions.reshape(shape)

    return program


def _emit_adaptive_max(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> tuple[Node, Node]:
    """Emit the operator with the split dimensions as they are, then their bins, then the merge over the ranks."""
    rank, dims = len(call.shape(0)), MAX_POOLS[call.op]
    local = tensor_value(inputs[0]).shape
    split = {d: plan.inputs[0].shards(d) for d in range(rank - dims, rank)}
    sizes = [local[d] if axes else call.out_shape[d] for d, axes in split.items()]
    both = emitter.call(call.op, inputs[0], sizes)
    values, flat = (emitter.call(operator.getitem, both, i) for i in (0, 1))
    owned = {d: owned_positions(plan.inputs[0], d, call.shape(0)[d], emitter.rank.coords) for d in split}
    flat = global_flat(emitter, flat, [Frame(local[d], call.shape(0)[d], owned[d][0]) for d in split])
    for d, axes in split.items():
        for axis, shard in axes:
            edges = own_edges(call.shape(0)[d], call.out_shape[d], owned[d][0], owned[d][-1] + 1)
            values, flat = _binned_winners(emitter, (values, flat), d, edges)
            tables = (rank_table(emitter, x, axis, shard.ranks) for x in (values, flat))
            pair = winner(emitter, aten.amax.default, *tables, dim=0)
            values, flat = (emitter.call(aten.select.int, x, 0, 0) for x in pair)
    return values, flat


def own_edges(size: int, bins: int, lo: int, hi: int) -> list[tuple[int, int]]:
    """Return, for each bin, the local interval of what ``[lo, hi)`` has of it; empty where it has nothing.

    Example:
        >>> own_edges(7, 3, 4, 7)
        [(0, 0), (0, 1), (0, 3)]
    """
    edges = [(b * size // bins, -(-(b + 1) * size // bins)) for b in range(bins)]
    inside = [(max(start, lo) - lo, min(end, hi) - lo) for start, end in edges]
    return [(start, end) if start < end else (0, 0) for start, end in inside]


def _binned_winners(
    emitter: Emitter, candidates: tuple[Node, Node], dim: int, edges: Sequence[tuple[int, int]]
) -> tuple[Node, Node]:
    """Emit the winner of each bin along ``dim``: every bin is read as its positions, the last of them repeated."""
    longest = max(end - start for start, end in edges)
    read = [[min(start + i, max(end - 1, 0)) for i in range(longest)] for start, end in edges]
    values, flat = candidates
    table = emitter.constant(flat, [p for row in read for p in row], -1)
    missing = emitter.constant(flat, [int(start == end) for start, end in edges], dim - tensor_value(flat).ndim - 1)
    missing = emitter.call(aten.to.dtype, missing, torch.bool)
    binned = []
    for x, fill in ((values, -math.inf), (flat, NO_POSITION)):
        taken = emitter.call(aten.index_select.default, x, dim, table)
        shape = list(tensor_value(taken).shape)
        shape[dim : dim + 1] = [len(edges), longest]
        taken = emitter.call(aten.reshape.default, taken, shape)
        binned.append(emitter.call(aten.masked_fill.Scalar, taken, missing, fill))
    pair = winner(emitter, aten.amax.default, *binned, dim=dim + 1)
    return emitter.call(aten.select.int, pair[0], dim + 1, 0), emitter.call(aten.select.int, pair[1], dim + 1, 0)

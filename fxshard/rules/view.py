"""Views: reshape, permute and their kin move a split to other dimensions without communication.

A reshape groups dimensions with equal products.  Inside a group the split factor S of a dimension has
``outer`` positions in front of it and ``inner`` behind it; the group's flat index is (outer, S, inner)::

    (N, C, H, W) -> (N, C, H*W)         split W:  (H, W, 1)    -> dim 2, bounds over W,   outer H
                                        split H:  (1, H, W)    -> dim 2, bounds over H*W, outer 1
    (N, C, H) -> (N, C, H/2, 2)         split H:  bounds halve where they are even, else moved to even ones
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Replicate, Shard, spread_bounds
from fxshard.rules.rule import Choice, Gather, Row, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten


def groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield ranges of dimensions of two shapes of equal element count that hold the same elements.

    Example:
        >>> list(groups((2, 6, 4), (2, 3, 8)))
        [(range(0, 1), range(0, 1)), (range(1, 3), range(1, 3))]
    """
    i = j = 0
    while i < len(source) or j < len(target):
        i0, j0, left, right = i, j, 1, 1
        while True:
            if left <= right and i < len(source) and (left < right or i == i0):
                left, i = left * source[i], i + 1
            elif right <= left and j < len(target) and (right < left or j == j0):
                right, j = right * target[j], j + 1
            else:
                break
        yield range(i0, i), range(j0, j)


def reshaped(source: Sequence[int], target: Sequence[int], shard: Shard) -> tuple[Shard, Shard] | None:
    """Return how a split input has to be placed for a reshape, and how its output then is.

    Args:
        source: The input's global shape.
        target: The output's global shape.
        shard: The input's split.

    Returns:
        ``(input, output)``, or None where the split does not survive the reshape.
    """
    for left, right in groups(source, target):
        if shard.dim in left:
            outer = math.prod(source[left.start : shard.dim]) * shard.outer
            inner = math.prod(source[shard.dim + 1 : left.stop])
            return _placed_in_group(shard, outer, inner, [(d, target[d]) for d in right])
    return None


def _placed_in_group(
    shard: Shard, outer: int, inner: int, dims: Sequence[tuple[int, int]]
) -> tuple[Shard, Shard] | None:
    """Find the output dimension of a group's (outer, S, inner) that takes the split."""
    before = 1
    for dim, size in dims:
        if outer % before:
            return None
        ahead = outer // before  # positions of the outer factor that fall into this dimension
        behind = before * size  # positions up to and with this dimension
        if behind > outer:
            return _placed_in_dim(shard, dim, size, ahead, inner)
        before = behind
    return None


def _placed_in_dim(shard: Shard, dim: int, size: int, ahead: int, inner: int) -> tuple[Shard, Shard] | None:
    """Return the split of an output dimension that reads as (ahead, positions of ``behind`` elements each)."""
    split, total = size // ahead, shard.size * inner
    if size % ahead or total % split:
        return None
    behind = total // split
    step = behind // math.gcd(behind, inner)  # a bound on both sides lies on a multiple of it
    if shard.size % step:
        return None
    spread = shard.bounds if step == 1 else spread_bounds(tuple((b + step // 2) // step for b in shard.bounds))
    if spread is None:
        return None
    before, after = (tuple(b * unit for b in spread) for unit in (step, step * inner // behind))
    return Shard(shard.dim, before, shard.outer), Shard(dim, after, ahead)


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    emit=lambda *a: _emit_reshape(*a),
    nested=True,
    split_as=lambda *a: _split_reshape(*a),
)
def place_reshape(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Carry the split through the reshape."""
    (shard,) = at
    assert isinstance(shard, Shard)
    shards = reshaped(call.shape(0), call.out_shape, shard)
    if shards is None:
        return Gather(f"the split of dim {shard.dim} does not survive {call.shape(0)} -> {call.out_shape}")
    return Row((shards[0],), (shards[1],))


def _split_reshape(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row | None:
    shards = reshaped(call.out_shape, call.shape(0), wanted)
    if shards is None or reshaped(call.shape(0), call.out_shape, shards[1]) != (shards[1], wanted):
        return None
    return Row((shards[1],), (wanted,))


def _emit_reshape(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    shape = emitter.local_shape(call.out_shape, plan.outputs[0])
    return emitter.call(aten.reshape.default, inputs[0], shape)


def _order(call: OpCall) -> list[int]:
    """Return for each dimension of the output the input's."""
    rank = len(call.shape(0))
    if call.op is aten.permute.default:
        return [d % rank for d in call["dims"]]
    order = list(range(rank))
    first, second = (call[n] % rank for n in ("dim0", "dim1")) if call.op is aten.transpose.int else (0, rank - 1)
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


@rule(
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    nested=True,
    split_as=lambda call, _, wanted: Row((wanted.on(_order(call)[wanted.dim]),), (wanted,)),
)
def place_permute(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Move the split with its dimension."""
    (shard,) = at
    assert isinstance(shard, Shard)
    return Row((shard,), (shard.on(_order(call).index(shard.dim)),))


@rule(aten.expand.default, emit=lambda *a: _emit_expand(*a), nested=True, split_as=lambda *a: _split_expand(*a))
def place_expand(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Repeat other dimensions than the split one."""
    (shard,) = at
    assert isinstance(shard, Shard)
    added = len(call.out_shape) - len(call.shape(0))
    return Row((shard,), (shard.on(shard.dim + added),))


def _split_expand(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row:
    dim = wanted.dim - (len(call.out_shape) - len(call.shape(0)))
    repeated = dim < 0 or call.shape(0)[dim] != call.out_shape[wanted.dim]
    return Row((Replicate() if repeated else wanted.on(dim),), (wanted,))


def _emit_expand(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    return emitter.call(aten.expand.default, inputs[0], emitter.local_shape(call.out_shape, plan.outputs[0]))

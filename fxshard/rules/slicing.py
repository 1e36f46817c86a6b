"""Slices of a split dimension, and their scatters.

``x[start:stop:step]`` is a stencil with one tap: output o reads position ``start + step * o``.  A rank computes the
outputs whose sources it has, so that nothing travels, unless that leaves the ranks with unequal work::

    position      0 1 2 3 4 5 | 6 7 8 9 10 11        bounds (0, 6, 12)
    x[1:10:2]       0   1   2 |   3   4              bounds (0, 3, 5), all local
    x[:6]         0 1 2 3 4 5                        bounds (0, 3, 6) in place of (0, 5, 6): three columns travel

A slice of fewer columns than ranks is taken whole: each rank puts the columns that it owns between zeros, and
their sum over the ranks is the slice -> Partial(sum).  Only the slice travels, never the map.

``slice_scatter`` is the same the other way: a rank replaces the positions that it owns, with the columns of the
source that belong there.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Interval, Partial, Placement, Replicate, Shard, Window, even_bounds, spread_bounds
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import holding
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
MOST_IMBALANCE = 1.25
"""How much longer than the mean, in columns and one more, a shard may be that needs no exchange."""
MOST_TINY_PIECES = 2
"""How many pieces with fewer columns than ranks are worth a sum each; with more the whole tensor travels once."""


def balanced(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return ``bounds``, or even ones where the longest shard is much longer than the mean.

    Args:
        bounds: ``n + 1`` integers that leave no rank empty.

    Example:
        >>> balanced((0, 5, 9)), balanced((0, 15, 16))
        ((0, 5, 9), (0, 8, 16))
    """
    ranks, size = len(bounds) - 1, bounds[-1]
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return even_bounds(size, ranks) if (longest - 1) * ranks > MOST_IMBALANCE * size else tuple(bounds)


def taken_within(taken: range, interval: Interval) -> Interval:
    """Return which elements of ``taken`` lie in an interval: ``taken[lo:hi]`` does.

    Example:
        >>> taken_within(range(1, 10, 2), (4, 8))
        (2, 4)
    """
    lo, hi = (min(max(-((taken.start - end) // taken.step), 0), len(taken)) for end in interval)
    return lo, max(lo, hi)


def covering(shard: Shard, needed: Sequence[Interval]) -> Shard:
    """Return ``shard`` holding what each rank needs; who needs nothing holds its first column.

    A rank with an empty window would not depend on the exchange, and a compiler could remove it there.
    :func:`trimmed` takes the column away again.

    Args:
        shard: Who owns what.
        needed: For each rank, an interval inside ``[0, size)``, possibly empty.
    """
    owned = ((b, b + 1) for b in shard.bounds)
    return holding(shard, Window(tuple(n if n[0] < n[1] else o for n, o in zip(needed, owned, strict=False))))


def trimmed(emitter: Emitter, x: Node, axis: int, have: Placement, needed: Sequence[Interval], dim: int) -> Node:
    """Emit what this rank needs of a split dimension, from what it holds.

    Args:
        emitter: Where to.
        x: A local node.
        axis: The mesh axis.
        have: How ``x`` is on that axis: whole, or a shard that :func:`covering` made.
        needed: For each rank, what it needs.
        dim: The dimension.
    """
    held = [have.interval(r) for r in range(have.ranks)] if isinstance(have, Shard) else [(0, 0)] * len(needed)
    if isinstance(have, Shard) and held == list(needed):
        return x
    coord = emitter.rank.coords[axis]
    lo, hi = (end - held[coord][0] for end in needed[coord])
    return emitter.call(aten.slice.Tensor, x, dim, lo, hi)


def split_axis(placements: Sequence[Placement], dim: int) -> int | None:
    """Return the mesh axis that splits ``dim``, or None."""
    return next((a for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim), None)


def _sliced(call: OpCall) -> tuple[int, range]:
    """Return the dimension of a slice and the positions that it takes."""
    dim = call["dim"] % len(call.shape(0))
    return dim, range(call.shape(0)[dim])[call["start"] : call["end"] : call["step"]]


def _selected(call: OpCall) -> tuple[int, range]:
    """Return the dimension of a select and the one position that it takes, as a range."""
    dim = call["dim"] % len(call.shape(0))
    index = call["index"] % call.shape(0)[dim]
    return dim, range(index, index + 1)


def _place_taken(call: OpCall, shard: Shard, taken: range) -> Row | Gather:
    """Place a slice along the split dimension, which stays in the output."""
    if shard.outer != 1:
        return Gather("the split dimension is a flattened one")
    stencil = Stencil(stride=taken.step, padding=-taken.start)
    bounds = stencil.output_bounds(shard.bounds, len(taken))
    if bounds is not None:
        bounds = balanced(bounds)
        return Row((holding(shard, stencil.input_window(bounds)),), (Shard(shard.dim, bounds),))
    value = call.output_values[0]
    assert value is not None
    if not taken:
        return Row((shard,), (Replicate(),))
    if value.is_floating_point() or value.is_complex():
        return Row((shard,), (Partial(),))
    window = Window(((taken[0], taken[-1] + 1),) * shard.ranks)  # no gradient: each rank fetches the slice
    return Row((holding(shard, window),), (Replicate(),))


@rule(aten.slice.Tensor, emit=lambda *a: _emit_slice(*a), nested=True)
def place_slice(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep the columns where they are, or sum a slice of few columns."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim, taken = _sliced(call)
    if shard.dim != dim or len(taken) == call.shape(0)[dim]:
        return Row(at, at)
    return _place_taken(call, shard, taken)


def _emit_slice(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dim, taken = _sliced(call)
    axis = split_axis(plan.inputs[0].axes, dim)
    if axis is None:
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    return _emit_taken(emitter, plan, inputs[0], axis, taken)


def _emit_taken(emitter: Emitter, plan: NodePlan, x: Node, axis: int, taken: range) -> Node:
    """Emit this rank's share of a slice along the dimension that ``axis`` splits."""
    shard, output = plan.inputs[0][axis], plan.outputs[0][axis]
    assert isinstance(shard, Shard)
    if isinstance(output, Shard) or shard.held:  # the window begins at this rank's first position
        return x if taken.step == 1 else emitter.call(aten.slice.Tensor, x, shard.dim, 0, None, taken.step)
    lo, hi = taken_within(taken, shard.interval(emitter.rank.coords[axis]))
    start, stop = _local_positions(taken, (lo, hi), shard.interval(emitter.rank.coords[axis])[0])
    part = emitter.call(aten.slice.Tensor, x, shard.dim, start, stop, taken.step)
    behind = [0, 0] * (part.meta["val"].ndim - 1 - shard.dim)
    return emitter.call(aten.constant_pad_nd.default, part, [*behind, lo, len(taken) - hi], 0)


def _local_positions(taken: range, part: Interval, first: int) -> Interval:
    """Return where ``taken[lo:hi]`` begins and ends, counted from ``first``; (0, 0) for nothing."""
    lo, hi = part
    return (taken[lo] - first, taken[hi - 1] - first + 1) if lo < hi else (0, 0)


@rule(aten.select.int, emit=lambda *a: _emit_select(*a), nested=True)
def place_select(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take a split dimension's column from its owner; elsewhere the split stays."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim, taken = _selected(call)
    if shard.dim != dim:
        return Row(at, (_without(shard, dim),))
    return _place_taken(call, shard, taken)


def _without(shard: Shard, dim: int) -> Shard:
    """Return the split after another dimension is gone."""
    return Shard(shard.dim - (shard.dim > dim), shard.bounds, shard.outer)


def _emit_select(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dim, taken = _selected(call)
    axis = split_axis(plan.inputs[0].axes, dim)
    if axis is None:
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    return emitter.call(aten.select.int, _emit_taken(emitter, plan, inputs[0], axis, taken), dim, 0)


@rule(aten.unbind.int, nested=True)
def place_unbind(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave a split that is not taken apart."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim = call["dim"] % len(call.shape(0))
    if shard.dim == dim:
        return Gather(f"every one of {shard.size} columns is a tensor of its own")
    return Row(at, (_without(shard, dim),) * len(call.output_values))


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
    nested=True,
)
def place_split(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Split other dimensions locally; the split dimension into slices."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim = call["dim"] % len(call.shape(0))
    if shard.dim != dim:
        return Row(at, at * len(call.output_values))
    sizes = [value.shape[dim] for value in call.output_values if value is not None]
    if sum(size < shard.ranks for size in sizes) > MOST_TINY_PIECES:
        return Gather(f"{len(sizes)} pieces of {max(sizes)} columns and fewer for {shard.ranks} ranks")
    return Expand(_slices(dim, sizes))


def _slices(dim: int, sizes: Sequence[int]) -> Any:
    ends = list(itertools.accumulate(sizes, initial=0))

    def program(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(aten.slice.Tensor(x, dim, lo, hi) for lo, hi in itertools.pairwise(ends))

    return program


@rule(aten.slice_scatter.default, emit=lambda *a: _emit_slice_scatter(*a), nested=True)
def place_slice_scatter(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Replace what a rank owns of the slice."""
    dim, taken = _sliced(call)
    lead = at[0] if isinstance(at[0], Shard) else at[1]
    assert isinstance(lead, Shard)
    if lead.dim != dim:
        return Row((lead, lead), (lead,))
    if lead.outer != 1:
        return Gather("the split dimension is a flattened one")
    bounds = spread_bounds(lead.bounds if lead is at[0] else even_bounds(call.shape(0)[dim], lead.ranks))
    if bounds is None:
        return Gather(f"{call.shape(0)[dim]} columns for {lead.ranks} ranks")
    image = Shard(dim, bounds)
    source = splittable(at[1], dim, len(taken), lead.ranks)
    if isinstance(source, Shard):
        source = covering(source, _replaced(taken, image))
    return Row((image, source), (image,))


def splittable(placement: Placement, dim: int, size: int, ranks: int) -> Placement:
    """Return how an input that is split somehow can be split along ``dim``; a whole one, or a small one, is whole."""
    if isinstance(placement, Replicate) or size < ranks:
        return Replicate()
    if isinstance(placement, Shard) and placement.dim == dim and placement.outer == 1:
        return placement
    return Shard(dim, even_bounds(size, ranks))


def _replaced(taken: range, image: Shard) -> list[Interval]:
    """Return for each rank the columns of the source that go to its part of the image."""
    return [taken_within(taken, image.interval(r)) for r in range(image.ranks)]


def _emit_slice_scatter(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dim, taken = _sliced(call)
    axis = split_axis(plan.outputs[0].axes, dim)
    if axis is None:
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    image = plan.outputs[0][axis]
    assert isinstance(image, Shard)
    needed, coord = _replaced(taken, image), emitter.rank.coords[axis]
    source = trimmed(emitter, inputs[1], axis, plan.inputs[1][axis], needed, dim)
    start, stop = _local_positions(taken, needed[coord], image.bounds[coord])
    return emitter.call(aten.slice_scatter.default, inputs[0], source, dim, start, stop, taken.step)


@rule(aten.select_scatter.default, nested=True)
def place_select_scatter(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Scatter a slice of one column."""
    dim, taken = _selected(call)

    def program(x: Tensor, src: Tensor, *args: Any) -> Tensor:
        return aten.slice_scatter.default(x, src.unsqueeze(dim), dim, taken.start, taken.stop)

    return Expand(program)


@rule(aten.copy.default, always=True, nested=True)
def place_copy(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Rewrite a functional ``copy_``, of which ATen has no derivative: the source in the target's shape and dtype."""

    def program(x: Tensor, src: Tensor, *args: Any) -> Tensor:
        return src.to(device=x.device, dtype=x.dtype).expand(x.shape)

    return Expand(program)

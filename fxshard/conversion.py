r"""Conversions between layouts: the nodes that bring a value from where it is to where it is wanted.

One axis after the other, which fills the corners of two-dimensional halos::

    from \\ to    Replicate         Shard                       Shard with a held window
    Replicate    (sum_gradient)    slice                       slice, halo_exchange (local without gradient)
    Partial      all_reduce        all_reduce, slice           all_reduce, slice, halo_exchange
    Shard        all_gather        halo_exchange (new bounds)  halo_exchange
                                   redistribute (new dim)      redistribute, halo_exchange

A replicated value that enters work which is split on an axis gets ``sum_gradient`` there: each rank's
gradient is only its part of the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.layout import Layout, Partial, Placement, Replicate, Shard, Window
from fxshard.ops.memory import inverse, is_dense, memory_order, same_strides
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from torch.fx import Node

    from fxshard.emitter import Emitter


def convert(
    emitter: Emitter,
    x: Node,
    source: Layout,
    target: Layout,
    summed_axes: frozenset[int] = frozenset(),
    *,
    needs_grad: bool = True,
) -> Node:
    """Emit the conversion of one value.

    Args:
        emitter: Where to.
        x: The local node that holds the value in layout ``source``.
        source: How it is.
        target: How it is wanted.
        summed_axes: The axes on which a replicated value feeds split work and needs its gradient summed.
        needs_grad: Whether a gradient flows back; without one a replicated value is cut locally.

    Returns:
        The local node in layout ``target``; ``x`` itself where nothing has to be done.
    """
    have, crossing = list(source), _crossing(source, target)
    for axis in _by_outer(source, innermost_first=True):
        want = target[axis]
        if not isinstance(want, Shard) or axis in crossing:
            x, have[axis] = _replicate(emitter, x, axis, source[axis]), Replicate()
            if axis in summed_axes and isinstance(want, Replicate):
                x = emitter.sum_gradient(x, axis)
    for axis in _by_outer(target, innermost_first=False):
        want = target[axis]
        if isinstance(want, Shard):
            x = _shard(emitter, x, axis, have[axis], want, needs_grad=needs_grad)
    return x


def _crossing(source: Layout, target: Layout) -> frozenset[int]:
    """Return the axes of which one is to split a dimension that the other one splits still: a map and its transpose."""
    found: set[int] = set()
    for axis, (have, want) in enumerate(zip(source, target, strict=True)):
        if isinstance(have, Shard) and isinstance(want, Shard) and have.dim != want.dim:
            others = [b for b, p in enumerate(source) if b != axis and isinstance(p, Shard) and p.dim == want.dim]
            found.update((axis, *others) if others else ())
    return frozenset(found)


def _by_outer(layout: Layout, *, innermost_first: bool) -> list[int]:
    """Return the axes in the order in which splits of one flattened dimension come off, or go on."""
    outers = [p.outer if isinstance(p, Shard) else 0 for p in layout]
    return sorted(range(len(outers)), key=outers.__getitem__, reverse=innermost_first)


def _replicate(emitter: Emitter, x: Node, axis: int, have: Placement) -> Node:
    if isinstance(have, Partial):
        return emitter.all_reduce(x, axis, have.op)
    if isinstance(have, Shard):
        return emitter.all_gather(x, axis, have)
    return x


def _shard(emitter: Emitter, x: Node, axis: int, have: Placement, want: Shard, *, needs_grad: bool) -> Node:
    if have == want:
        return x
    if isinstance(have, Replicate) and want.held and not needs_grad and want.held.fill.mode == "constant":
        return emitter.cut(x, axis, want, want.held)
    if isinstance(have, Shard) and have.dim != want.dim and have.outer == want.outer == 1:
        x, have = emitter.redistribute(x, axis, have, want.owned), want.owned
    elif not isinstance(have, Shard) or have.dim != want.dim or not have.outer == want.outer == 1:
        x, have = emitter.slice(_replicate(emitter, x, axis, have), axis, want.owned), want.owned
    return emitter.fetch(x, axis, have, want.held or owned_window(want))


def laid_out_as(emitter: Emitter, x: Node, like: torch.Tensor) -> Node:
    """Emit a whole value with the memory order that it has on one device, for operators that may read it.

    Args:
        emitter: Where to.
        x: The local node that holds the whole value.
        like: The value on one device, fake.  One with gaps, such as a slice of another, is no order to restore.

    Returns:
        A local node with the strides of ``like``; ``x`` itself where it has them, or where there is nothing to restore.
    """
    if same_strides(tensor_value(x), like) or not is_dense(like):
        return x
    aten, order = torch.ops.aten, memory_order(like)
    ordered = emitter.call(aten.permute.default, x, list(order))
    copied = emitter.call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return emitter.call(aten.permute.default, copied, list(inverse(order)))


def owned_window(shard: Shard) -> Window:
    """Return the window of a shard that holds what it owns."""
    return Window(tuple(zip(shard.bounds, shard.bounds[1:], strict=False)))

"""Pooling: windows like a convolution's, with the operator's own idea of what is outside.

max pool    outside is -inf; the local operator runs on the fetched window without padding; a position
            counts in the window, and is moved by the window's offset
avg pool    outside adds 0; the divisor is the count of positions that the operator counts,
            which near the border is less than the kernel:
                count(o) = min(s*o - p + k, size + p) - max(s*o - p, -p or 0)   clipped to [0, size)
                           where padding is not counted

Adaptive pools are in :mod:`fxshard.rules.adaptive_pool`.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Fill, Placement, Shard
from fxshard.rules.rule import Choice, Gather, Row, rule
from fxshard.rules.stencil import per_dim, split_dims, stencil_shards, unpadded
from fxshard.values import tensor_value
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
OUTSIDE_MAX = Fill("constant", -math.inf)
MAX_POOLS = {aten.max_pool1d.default: 1, aten.max_pool2d.default: 2, aten.max_pool3d.default: 3}
INDEXED_POOLS = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
AVG_POOLS = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}


def _geometry(call: OpCall, dims: int) -> tuple[int, list[Stencil]]:
    """Return the image's first spatial dimension and the stencil of each spatial dimension."""
    kernel = per_dim(call["kernel_size"], dims)
    stride = per_dim(call["stride"] or kernel, dims)
    padding = per_dim(call["padding"], dims)
    dilation = per_dim(call.arguments.get("dilation", [1]), dims)
    stencils = [Stencil(*sizes) for sizes in zip(kernel, stride, padding, dilation, strict=True)]
    return len(call.shape(0)) - dims, stencils


def _place_windows(call: OpCall, image: Placement, dims: int, fill: Fill) -> Choice:
    first, stencils = _geometry(call, dims)
    assert isinstance(image, Shard)
    if image.dim < first:
        return Row((image,), (image,))
    shards = stencil_shards(image, stencils[image.dim - first], call.out_shape[image.dim], fill)
    return shards if isinstance(shards, Gather) else Row((shards[0],), (shards[1],))


@rule(*MAX_POOLS, emit=lambda *a: _emit_max_pool(*a))
def place_max_pool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch each output's window, -inf outside."""
    return _place_windows(call, at[0], MAX_POOLS[call.op], OUTSIDE_MAX)


def _emit_max_pool(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    first, stencils = _geometry(call, MAX_POOLS[call.op])
    padding = unpadded([s.padding for s in stencils], plan, first)
    ceil_mode = call["ceil_mode"] and not _all_split(call, plan, first)
    args, kwargs = call.rebind(inputs, padding=padding, ceil_mode=ceil_mode)
    return emitter.call(call.op, *args, **kwargs)


def _all_split(call: OpCall, plan: NodePlan, first: int) -> bool:
    return split_dims(plan) >= set(range(first, len(call.shape(0))))


@rule(*INDEXED_POOLS, emit=lambda *a: _emit_indexed_pool(*a))
def place_indexed_pool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Place the maxima; their positions are placed alike."""
    choice = _place_windows(call, at[0], INDEXED_POOLS[call.op], OUTSIDE_MAX)
    return Row(choice.inputs, choice.outputs * 2) if isinstance(choice, Row) else choice


def _emit_indexed_pool(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> tuple[Node, Node]:
    """Emit the local maxima and their flat positions in the global image."""
    first, stencils = _geometry(call, INDEXED_POOLS[call.op])
    padding = unpadded([s.padding for s in stencils], plan, first)
    ceil_mode = call["ceil_mode"] and not _all_split(call, plan, first)
    args, kwargs = call.rebind(inputs, padding=padding, ceil_mode=ceil_mode)
    both = emitter.call(call.op, *args, **kwargs)
    values, positions = (emitter.call(operator.getitem, both, i) for i in (0, 1))
    frames = []
    for i, (size, stencil) in enumerate(zip(call.shape(0)[first:], stencils, strict=True)):
        held = plan.inputs[0].shards(first + i)
        offset = held[0][1].interval(emitter.rank.coords[held[0][0]])[0] if held else 0
        frames.append(Frame(tensor_value(inputs[0]).shape[first + i], size, offset, stencil.dilation))
    return values, global_flat(emitter, positions, frames)


@dataclass(frozen=True)
class Frame:
    """Where a local image lies in the global one, along one spatial dimension.

    Args:
        local: The local size.
        size: The global size.
        offset: The global position of the first local one; negative where the image begins in the padding.
        dilation: The pool's; see :func:`global_flat`.
    """

    local: int
    size: int
    offset: int
    dilation: int = 1


def global_flat(emitter: Emitter, flat: Node, frames: Sequence[Frame]) -> Node:
    """Emit the flat positions in the global image of flat positions in the local one.

    Where all that a window sees is -inf the local operator names the window's first position, which may lie in the
    padding; ATen names the first one inside the image, which is the position modulo the dilation.

    Args:
        emitter: Where to.
        flat: Row-major positions in the local image, int64.
        frames: One for each spatial dimension.
    """
    position = None
    behind = math.prod(f.local for f in frames)
    for frame in frames:
        behind //= frame.local
        along = emitter.call(aten.div.Scalar_mode, flat, behind, rounding_mode="floor")
        along = emitter.call(aten.remainder.Scalar, along, frame.local)
        along = emitter.call(aten.add.Scalar, along, frame.offset)
        inside = emitter.call(aten.remainder.Scalar, along, frame.dilation)
        along = emitter.call(aten.where.self, emitter.call(aten.lt.Scalar, along, 0), inside, along)
        if position is None:
            position = along
        else:
            position = emitter.call(aten.add.Tensor, emitter.call(aten.mul.Scalar, position, frame.size), along)
    assert position is not None
    return position


@rule(*AVG_POOLS, emit=lambda *a: _emit_avg_pool(*a))
def place_avg_pool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch each output's window, zeros outside."""
    return _place_windows(call, at[0], AVG_POOLS[call.op], Fill())


def _emit_avg_pool(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit local means, then correct them where the global operator divides by another count."""
    dims = AVG_POOLS[call.op]
    first, stencils = _geometry(call, dims)
    split = split_dims(plan)
    padding = unpadded([s.padding for s in stencils], plan, first)
    y = emitter.call(call.op, *_avg_arguments(call, inputs[0], stencils, padding))
    if call.arguments.get("divisor_override"):
        return y
    for i, stencil in enumerate(stencils):
        dim = first + i
        if dim in split:
            y = _corrected(emitter, call, plan, y, dim, stencil)
    return y


def _avg_arguments(call: OpCall, x: Node, stencils: Sequence[Stencil], padding: Sequence[int]) -> tuple[Any, ...]:
    kernel, stride = [s.kernel for s in stencils], [s.stride for s in stencils]
    rest = (kernel, stride, list(padding), call["ceil_mode"], call["count_include_pad"])
    return (x, *rest, call["divisor_override"]) if "divisor_override" in call.arguments else (x, *rest)


def counted(stencil: Stencil, out: int, size: int, *, include_pad: bool) -> int:
    """Return how many positions an average pool divides by along one dimension (ATen's pool kernels).

    Args:
        stencil: The pool's stencil.
        out: The output position.
        size: The input's size.
        include_pad: Whether padding counts.
    """
    lo, hi = stencil.window(out, out + 1)
    end = min(hi, size + stencil.padding)
    return end - lo if include_pad else min(end, size) - max(lo, 0)


def _corrected(emitter: Emitter, call: OpCall, plan: NodePlan, y: Node, dim: int, stencil: Stencil) -> Node:
    """Multiply by kernel / count where a split dimension's border outputs count fewer positions."""
    size, include_pad = call.shape(0)[dim], bool(call["count_include_pad"])
    counts = [counted(stencil, o, size, include_pad=include_pad) for o in range(call.out_shape[dim])]
    if all(c == stencil.kernel for c in counts):
        return y
    axis, shard = plan.outputs[0].shards(dim)[0]
    lo, hi = shard.interval(emitter.rank.coords[axis])
    rank = len(call.out_shape)
    factors = [stencil.kernel / c for c in counts[lo:hi]]
    return emitter.call(aten.mul.Tensor, y, emitter.constant(y, factors, dim - rank))


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default)
def place_unpool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Gather: where a value goes is data."""
    return Gather("the positions that values go to are data")

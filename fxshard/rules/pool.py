"""Pooling: windows like a convolution's, with the operator's own idea of what is outside.

max pool    outside is -inf; the local operator runs on the fetched window without padding
avg pool    outside adds 0; the divisor is the count of positions that the operator counts,
            which near the border is less than the kernel:
                count(o) = min(s*o - p + k, size + p) - max(s*o - p, -p or 0)   clipped to [0, size)
                           where padding is not counted
adaptive    bin o covers [floor(o*S/O), ceil((o+1)*S/O)): one bin is a mean; else the bins are rows
            of a matrix, and a rank contributes the columns that it owns -> Partial(sum)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Fill, Partial, Placement, Shard
from fxshard.rules.reduce import LOW_PRECISION
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import per_dim, split_dims, stencil_shards, unpadded
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
OUTSIDE_MAX = Fill("constant", -math.inf)
MAX_POOLS = {aten.max_pool1d.default: 1, aten.max_pool2d.default: 2, aten.max_pool3d.default: 3}
AVG_POOLS = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
ADAPTIVE_POOLS = {
    aten.adaptive_avg_pool1d.default: 1,
    aten.adaptive_avg_pool2d.default: 2,
    aten.adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
}


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


@rule(*ADAPTIVE_POOLS, emit=lambda *a: _emit_adaptive(*a))
def place_adaptive_pool(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave a split batch or channel; average the whole dimension, or contribute to the bins."""
    (image,) = at
    assert isinstance(image, Shard)
    rank, dims = len(call.shape(0)), ADAPTIVE_POOLS[call.op]
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
    y, rank, dims = inputs[0], len(call.shape(0)), ADAPTIVE_POOLS[call.op]
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

"""Reductions: over other dimensions they are local, over a split one they leave a term on each rank.

sum   : partial sums                                  -> Partial(sum)
mean  : partial sums over the global count            -> Partial(sum)
var   : merged from each rank's (count, mean, M2), in float32 or wider:
        mean = sum_r n_r m_r / N,   M2 = sum_r (M2_r + n_r (m_r - mean)^2)
        (Chan, Golub and LeVeque, 1979)
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Partial, Placement, Replicate, Shard
from fxshard.rules.rule import Choice, Expand, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
LOW_PRECISION = (torch.bfloat16, torch.float16)


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """Return the dimensions that the call reduces; all of them where it names none."""
    rank = len(call.shape(0))
    dims = call.arguments.get("dim")
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(d % rank for d in ([dims] if isinstance(dims, int) else dims))


def surviving(shard: Shard, dims: Sequence[int], *, keepdim: bool) -> Shard:
    """Return the split of the output of a reduction over other dimensions than the split one."""
    dropped = 0 if keepdim else sum(d < shard.dim for d in set(dims))
    return Shard(shard.dim - dropped, shard.bounds, shard.outer)


def _accumulated_wider(call: OpCall) -> Choice:
    """Sum 16-bit values in float32 until every rank's term is in."""
    op, dtype = call.op, call.output_values[0].dtype  # type: ignore[union-attr]

    def program(*args: Any) -> Any:
        return op(*args[:-1], dtype=torch.float32).to(dtype)

    return Expand(program)


def _is_low_precision(call: OpCall) -> bool:
    value = call.output_values[0]
    return value is not None and value.dtype in LOW_PRECISION


@rule(aten.sum.default, aten.sum.dim_IntList, nested=True)
def place_sum(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave partial sums where the split dimension is summed."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dims = reduced_dims(call)
    if shard.dim not in dims:
        return Row(at, (surviving(shard, dims, keepdim=bool(call.arguments.get("keepdim"))),))
    return _accumulated_wider(call) if _is_low_precision(call) else Row(at, (Partial(),))


@rule(aten.mean.default, aten.mean.dim, emit=lambda *a: _emit_mean(*a), nested=True)
def place_mean(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum and divide by the global count."""
    return place_sum(call, at)


def _emit_mean(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dims, dtype = reduced_dims(call), call["dtype"]
    if not any(isinstance(p, Partial) for p in plan.outputs[0]):
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    keepdim = bool(call.arguments.get("keepdim"))
    total = emitter.call(aten.sum.dim_IntList, inputs[0], list(dims), keepdim, dtype=dtype)
    return emitter.call(aten.div.Scalar, total, float(math.prod(call.shape(0)[d] for d in dims)))


@rule(aten.var_mean.correction, emit=lambda *a: _emit_var_mean(*a), nested=True)
def place_var_mean(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Merge the moments of the ranks where the split dimension is reduced; both results are whole."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dims = reduced_dims(call)
    if shard.dim not in dims:
        return Row(at, (surviving(shard, dims, keepdim=bool(call["keepdim"])),) * 2)
    if _is_low_precision(call):
        return Expand(_var_mean_in_float32)
    return Row(at, (Replicate(), Replicate()))


def _var_mean_in_float32(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = aten.var_mean.correction(x.float(), *args, **kwargs)
    return var.to(x.dtype), mean.to(x.dtype)


def _emit_var_mean(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node | tuple[Node, ...]:
    """Emit local moments, one gather of them for each split axis, and the merge."""
    dims, keepdim = list(reduced_dims(call)), bool(call["keepdim"])
    axes = [(a, p) for a, p in enumerate(plan.inputs[0]) if isinstance(p, Shard) and p.dim in dims]
    if not axes:
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    count = math.prod(call.shape(0)[d] for d in dims)
    correction = 1 if call["correction"] is None else call["correction"]
    moments = emitter.call(aten.var_mean.correction, inputs[0], dims, correction=0, keepdim=keepdim)
    pair = [emitter.call(operator.getitem, moments, i) for i in (0, 1)]
    stacked = emitter.call(aten.stack.default, pair, 0)
    for axis, shard in axes:
        stacked = _merge_moments(emitter, stacked, axis, shard)
    var = emitter.call(aten.select.int, stacked, 0, 0)
    mean = emitter.call(aten.select.int, stacked, 0, 1)
    divisor = max(0.0, count - correction)
    scaled = emitter.call(aten.mul.Scalar, var, count / divisor if divisor else math.inf)
    return scaled, mean


def _merge_moments(emitter: Emitter, stacked: Node, axis: int, shard: Shard) -> Node:
    """Merge (biased variance, mean), stacked in dimension 0, over the ranks of one axis."""
    share = shard.length(emitter.rank.coords[axis]) / shard.size
    variance = emitter.call(aten.select.int, stacked, 0, 0)
    weight = emitter.call(aten.full_like.default, variance, share)
    row = emitter.call(aten.cat.default, [stacked, emitter.call(aten.unsqueeze.default, weight, 0)], 0)
    one_each = Shard(0, tuple(range(shard.ranks + 1)))
    table = emitter.all_gather(emitter.call(aten.unsqueeze.default, row, 0), axis, one_each)
    variances, means, weights = (emitter.call(aten.select.int, table, 1, i) for i in range(3))
    mean = _weighted_sum(emitter, means, weights)
    away = emitter.call(aten.sub.Tensor, means, mean)
    spread = emitter.call(aten.add.Tensor, variances, emitter.call(aten.mul.Tensor, away, away))
    return emitter.call(aten.stack.default, [_weighted_sum(emitter, spread, weights), mean], 0)


def _weighted_sum(emitter: Emitter, terms: Node, weights: Node) -> Node:
    return emitter.call(aten.sum.dim_IntList, emitter.call(aten.mul.Tensor, terms, weights), [0])

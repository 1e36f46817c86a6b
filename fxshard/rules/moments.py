"""Variances: merged from each rank's (count, mean, M2), in float32 or wider.

    mean = sum_r n_r m_r / N          M2 = sum_r (M2_r + n_r (m_r - mean)^2)        var = M2 / (N - correction)

(Chan, Golub and LeVeque, 1979.)  Every other overload is arithmetic on ``var_mean``::

    std = sqrt(var)       its gradient where var is 0 is 0, as ATen's std_backward has it
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.reduce import (
    in_float32,
    is_low_precision,
    local_reduction,
    rank_table,
    reduced_axes,
    reduced_dims,
    wide,
)
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten


@rule(aten.var_mean.correction, emit=lambda *a: _emit_var_mean(*a), nested=True)
def place_var_mean(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Merge the moments of the ranks where the split dimension is reduced; both results are whole."""
    row = local_reduction(call, at)
    if row is not None:
        return row
    mean = call.output_values[1]
    if mean is not None and mean.is_complex():
        return Gather("the moments of complex numbers have no merge yet")
    return in_float32(call) if is_low_precision(call) else Row(at, (Replicate(), Replicate()))


@rule(aten.var.correction, aten.std.correction, aten.std_mean.correction, nested=True)
def place_variance(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Make it from the mean and the variance over all ranks."""
    op = call.op

    def program(x: Tensor, dim: Any = None, **kwargs: Any) -> Any:
        var, mean = aten.var_mean.correction(wide(x), dim, **kwargs)
        if op is aten.var.correction:
            return var.to(_real(x))
        deviation = square_root(var).to(_real(x))
        return deviation if op is aten.std.correction else (deviation, mean.to(x.dtype))

    return local_reduction(call, at) or Expand(program)


def _real(x: Tensor) -> torch.dtype:
    return x.real.dtype if x.is_complex() else x.dtype


def square_root(x: Tensor) -> Tensor:
    """Return ``sqrt(x)`` with the gradient 0 where ``x`` is 0.

    Example:
        >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
        >>> square_root(x).sum().backward(); x.grad
        tensor([0.0000, 0.2500])
    """
    vanishes = x == 0
    return x.masked_fill(vanishes, 1).sqrt().masked_fill(vanishes, 0)


def _emit_var_mean(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node | tuple[Node, ...]:
    """Emit local moments, one gather of them for each split axis, and the merge."""
    dims, keepdim = list(reduced_dims(call)), bool(call["keepdim"])
    axes = reduced_axes(plan.inputs[0], dims)
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
    table = rank_table(emitter, row, axis, shard.ranks)
    variances, means, weights = (emitter.call(aten.select.int, table, 1, i) for i in range(3))
    first = emitter.call(aten.select.int, means, 0, 0)  # equal means stay equal to the last bit
    differences = emitter.call(aten.sub.Tensor, means, first)
    shift = _weighted_sum(emitter, differences, weights)
    away = emitter.call(aten.sub.Tensor, differences, shift)
    spread = emitter.call(aten.add.Tensor, variances, emitter.call(aten.mul.Tensor, away, away))
    mean = emitter.call(aten.add.Tensor, first, shift)
    return emitter.call(aten.stack.default, [_weighted_sum(emitter, spread, weights), mean], 0)


def _weighted_sum(emitter: Emitter, terms: Node, weights: Node) -> Node:
    return emitter.call(aten.sum.dim_IntList, emitter.call(aten.mul.Tensor, terms, weights), [0])

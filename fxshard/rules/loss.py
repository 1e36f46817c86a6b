"""Losses: elementwise terms stay where they are; sums, and what a mean divides by, are those of all pixels.

    mse, huber, ...     f(x, t)                        elementwise, then the rules of mean and sum
    nll                 sum_i -w[t_i] x[t_i, i]  /  sum_i w[t_i]           over the pixels i that are not ignored
    cross entropy       with smoothing s over C classes:
                        (1 - s) nll(log_softmax x)  +  s/C sum_i sum_c -w[c] log_softmax(x)[c, i] / sum_i w[t_i]

A rank may have no pixel that counts: it contributes 0 to both sums.  Split over the classes, the class of a
pixel is found by comparison with every class.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.pointwise import place_pointwise
from fxshard.rules.reduce import LOW_PRECISION
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
NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for ``reduction``."""


@rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    nested=True,
)
def place_elementwise_loss(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take the elementwise terms, then reduce them."""
    if call["reduction"] == NONE:
        return place_pointwise(call, at)
    op, names, reduction = call.op, list(call.arguments), call["reduction"]

    def program(*args: Any, **kwargs: Any) -> Tensor:
        bound = {**dict(zip(names, args, strict=False)), **kwargs, "reduction": NONE}
        terms = op(*bound.values())
        return terms.mean() if reduction == MEAN else terms.sum()

    return Expand(program)


@rule(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    emit=lambda *a: _emit_nll(*a),
    nested=True,
)
def place_nll(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum the terms and the weights of each rank's pixels."""
    class_dim = min(1, len(call.shape(0)) - 1)
    scores, target = at[:2]
    if isinstance(scores, Shard) and scores.dim == class_dim:
        return Expand(_nll_by_comparison)
    if isinstance(scores, Shard):
        target = Shard(scores.dim - (scores.dim > class_dim), scores.bounds, scores.outer)
    elif isinstance(target, Shard):
        scores = Shard(target.dim + (target.dim >= class_dim), target.bounds, target.outer)
    else:
        return Gather("only the weights of the classes are split")
    first = target if call["reduction"] == NONE else Replicate()
    return Row((scores, target, *(Replicate(),) * (len(at) - 2)), (first, Replicate()))


def _emit_nll(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node | tuple[Node, ...]:
    """Emit this rank's sums of terms and of weights, their totals, and the quotient."""
    if call["reduction"] == NONE:
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    dtype = tensor_value(inputs[0]).dtype
    floating = [i for i, x in enumerate(inputs) if tensor_value(x).dtype in LOW_PRECISION]
    wider = [emitter.call(aten.to.dtype, x, torch.float32) if i in floating else x for i, x in enumerate(inputs)]
    args, kwargs = call.rebind(wider, reduction=SUM)
    both = emitter.call(call.op, *args, **kwargs)
    sums = emitter.call(aten.stack.default, [emitter.call(operator.getitem, both, i) for i in (0, 1)])
    for axis in sorted(plan.sharded_axes):
        sums = emitter.all_reduce(sums, axis)
    loss, weight = (emitter.call(aten.select.int, sums, 0, i) for i in (0, 1))
    if call["reduction"] == MEAN:
        loss = emitter.call(aten.div.Tensor, loss, weight)
    return emitter.call(aten.to.dtype, loss, dtype), emitter.call(aten.to.dtype, weight, dtype)


def _nll_by_comparison(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dim = min(1, x.ndim - 1)
    along = [-1 if d == dim else 1 for d in range(x.ndim)]
    classes = torch.arange(x.shape[dim], device=x.device).reshape(along)
    counts = (target.unsqueeze(dim) == classes) & (target.unsqueeze(dim) != ignore_index)
    weights = torch.ones_like(x) if weight is None else weight.reshape(along).expand_as(x)
    terms = (-x * weights).masked_fill(~counts, 0).sum(dim)
    if reduction == NONE:
        return terms, x.new_zeros(())
    total = weights.masked_fill(~counts, 0).sum()
    return (terms.sum() / total if reduction == MEAN else terms.sum()), total


@rule(aten.cross_entropy_loss.default, nested=True)
def place_cross_entropy(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take ATen's own decomposition; with label smoothing one whose divisor is not found by selection."""
    indexed = not tensor_value(call.inputs[1]).is_floating_point()
    return Expand(_smoothed if indexed and call["label_smoothing"] > 0 else call.op)


def _smoothed(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    dim = min(1, x.ndim - 1)
    scores = x.log_softmax(dim)
    along = [-1 if d == dim else 1 for d in range(x.ndim)]
    weighted = scores if weight is None else scores * weight.reshape(along)
    smooth = -weighted.sum(dim).masked_fill(target == ignore_index, 0)
    nll, total = _nll(scores, target, weight, reduction, ignore_index)
    if reduction == NONE:
        nll = nll.reshape(target.shape)
    else:
        smooth = smooth.sum() / total if reduction == MEAN else smooth.sum()
    return (1 - label_smoothing) * nll + label_smoothing / x.shape[dim] * smooth


def _nll(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    if scores.ndim < 3:
        return aten.nll_loss_forward.default(scores, target, weight, reduction, ignore_index)
    n, classes = scores.shape[:2]
    flat = scores.reshape(n, classes, 1, -1), target.reshape(n, 1, -1)
    return aten.nll_loss2d_forward.default(*flat, weight, reduction, ignore_index)

"""Softmax: local where its dimension is not split, else by the maximum and the sum over all ranks.

softmax(x)      e / sum(e)                    e = exp(x - m),   m = max(x), of which no gradient is taken:
log_softmax(x)  x - m - log(sum(e))               the result does not depend on it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Shard
from fxshard.rules.reduce import wide
from fxshard.rules.rule import Choice, Expand, Row, rule

if TYPE_CHECKING:
    from torch import Tensor

    from fxshard.rules.call import OpCall

aten = torch.ops.aten


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default, nested=True)
def place_softmax(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Stay local while the dimension is whole."""
    (shard,) = at
    assert isinstance(shard, Shard)
    if shard.dim != call["dim"] % len(call.shape(0)):
        return Row(at, (shard,))
    value = call.output_values[0]
    assert value is not None
    formula, dtype = FORMULAS[call.op], value.dtype
    return Expand(lambda x, dim, *_, **__: formula(wide(x.to(dtype)), dim).to(dtype))


def _softmax(x: Tensor, dim: int) -> Tensor:
    terms = (x - x.detach().amax(dim, keepdim=True)).exp()
    return terms / terms.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int) -> Tensor:
    away = x - x.detach().amax(dim, keepdim=True)
    return away - away.exp().sum(dim, keepdim=True).log()


def _safe_softmax(x: Tensor, dim: int) -> Tensor:
    """Return the softmax, 0 where every position is masked by -inf."""
    most = x.detach().amax(dim, keepdim=True)
    masked = most == -torch.inf
    terms = (x - most.masked_fill(masked, 0)).exp()
    total = terms.sum(dim, keepdim=True)
    return terms / total.masked_fill(masked, 1)


FORMULAS = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._safe_softmax.default: _safe_softmax,
}

"""Vector norms over split dimensions: a reduction of powers, with ATen's gradients where they have a corner.

p = 0            count of what is not 0             p = inf, -inf    amax, amin of |x|
p = 1            sum |x|                            p = 2            sqrt(sum |x|^2), gradient 0 at x = 0
any other p      (sum |x|^p)^(1/p), gradient 0 where x is 0
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fxshard.rules.moments import square_root
from fxshard.rules.reduce import local_reduction, named_dims, wide
from fxshard.rules.rule import Choice, Expand, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxshard.layout import Placement
    from fxshard.rules.call import OpCall

aten = torch.ops.aten


@rule(aten.linalg_vector_norm.default, nested=True)
def place_vector_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Reduce powers of the magnitudes."""
    value = call.output_values[0]
    assert value is not None
    result = value.dtype

    def program(
        x: Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        cast = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
        return _norm(wide(cast), order, named_dims(x, dim), keepdim).to(result)

    return local_reduction(call, at) or Expand(program)


def _norm(x: Tensor, order: float, dims: list[int], keepdim: bool) -> Tensor:
    if order == 2 and not x.is_complex():
        return square_root((x * x).sum(dims, keepdim))
    size = x.abs()
    if order == 2:
        return square_root((size * size).sum(dims, keepdim))
    if order == 0:
        return (size != 0).sum(dims, keepdim).to(size.dtype)
    if math.isinf(order):
        return size.amax(dims, keepdim) if order > 0 else size.amin(dims, keepdim)
    if order == 1:
        return size.sum(dims, keepdim)
    return _power(_power(size, order).sum(dims, keepdim), 1 / order)


def _power(x: Tensor, exponent: float) -> Tensor:
    """Return ``x ** exponent`` with the gradient 0 where ``x`` is 0."""
    vanishes = x == 0
    return x.masked_fill(vanishes, 1).pow(exponent).masked_fill(vanishes, 0 if exponent > 0 else math.inf)


@rule(
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    nested=True,
)
def place_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Rewrite the old name with the new one."""

    def program(
        x: Tensor, p: float | None = 2, dim: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        return torch.linalg.vector_norm(x, 2 if p is None else p, dim or None, keepdim, **kwargs)

    return local_reduction(call, at) or Expand(program)

"""Matrix products with pixels as rows, and the contraction of a split dimension.

    linear  x (..., K), w (O, K)   rows split: local       K split: w sliced along K, terms -> Partial(sum)
    mm      a (M, K),  b (K, N)    the same; a column split of b splits the output's columns
    bmm     (B, M, K), (B, K, N)   a split batch, rows or columns are local
    mv, dot                        a column, and a sum of products

Proof: a product's rows depend on the same rows of the left factor; a sum over K is the sum of the ranks'
sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Partial, Placement, Replicate, Shard
from fxshard.rules.reduce import is_low_precision
from fxshard.rules.rule import Choice, Expand, Row, rule

if TYPE_CHECKING:
    from torch import Tensor

    from fxshard.rules.call import OpCall

aten = torch.ops.aten


@rule(aten.linear.default, nested=True)
def place_linear(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep split rows; contract a split channel dimension into partial sums."""
    image = at[0]
    last = len(call.shape(0)) - 1
    if isinstance(image, Shard) and image.dim != last:
        return Row((image, *(Replicate(),) * (len(at) - 1)), (image,))
    return Expand(_linear)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = aten.mm(x.reshape(-1, x.shape[-1]), weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias


@rule(aten.mm.default, aten.bmm.default, nested=True)
def place_product(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Split rows, columns or batch stay; a split contraction leaves partial sums."""
    left, right = at
    rank = len(call.shape(0))
    lead = left if isinstance(left, Shard) else right
    assert isinstance(lead, Shard)
    contracted = rank - 1 if lead is left else rank - 2
    if lead.dim == contracted:
        if is_low_precision(call):
            return Expand(_product_in_float32(call.op))
        return Row((lead.on(rank - 1), lead.on(rank - 2)), (Partial(),))
    if lead.dim < rank - 2:
        return Row((lead.on(lead.dim), lead.on(lead.dim)), (lead.on(lead.dim),))
    wanted = (lead, Replicate()) if lead is left else (Replicate(), lead)
    return Row(wanted, (lead.on(lead.dim),))


def _product_in_float32(op: torch._ops.OpOverload) -> Any:
    def program(left: Tensor, right: Tensor) -> Tensor:
        return op(left.float(), right.float()).to(left.dtype)

    return program


@rule(aten.addmm.default, aten.baddbmm.default)
def place_added_product(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Separate the sum from the product."""
    product = aten.mm if call.op is aten.addmm.default else aten.bmm

    def program(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        term = product(left, right)
        term = term if alpha == 1 else term * alpha
        return term + (bias if beta == 1 else bias * beta)

    return Expand(program)


@rule(aten.mv.default, nested=True)
def place_matrix_vector(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Multiply by a matrix of one column."""
    return Expand(lambda matrix, vector: aten.mm(matrix, vector.unsqueeze(1)).squeeze(1))


@rule(aten.dot.default, nested=True)
def place_dot(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum products."""
    return Expand(lambda left, right: (left * right).sum())

"""``fxshard::all_reduce``: Partial -> Replicate, the sum (or extremum) of the ranks' terms on every rank.

``y = x_0 + x_1 + ...`` is the same on every rank, and so is its gradient; each term's gradient is that gradient
as it is.  The backward of a sum is therefore the identity, :mod:`fxshard.ops.sum_gradient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.errors import FxShardError
from fxshard.ops.lowering import define, differentiate

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("sum", "max", "min")
"""The reductions there are."""


@define("all_reduce", "(Tensor x, str op, str group) -> Tensor")
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """Return the reduction of the ranks' tensors.

    Args:
        x: This rank's term, of the same shape on every rank.
        op: ``"sum"``, ``"max"`` or ``"min"``; the last two only for values without a gradient.
        group: The name of the process group.

    Returns:
        A new contiguous tensor, the same on every rank.

    Raises:
        FxShardError: There is no such reduction.
    """
    _check(op)
    # contiguous: the strides of one rank need not be those of another
    reduced = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def _check(op: str) -> None:
    if op not in REDUCTIONS:
        msg = f"fxshard::all_reduce: op {op!r} is not one of {', '.join(REDUCTIONS)}"
        raise FxShardError(msg)


@all_reduce.register_fake
def _(x: Tensor, op: str, group: str) -> Tensor:  # noqa: ARG001
    _check(op)
    return x.new_empty(x.shape)


def _backward(grad: Tensor, op: str, group: str) -> Tensor:
    if op != "sum":
        msg = (
            f"fxshard::all_reduce(op={op!r}) has no gradient: which rank has the extremum is not recorded; "
            "detach its input, or express the value by sums"
        )
        raise FxShardError(msg)
    return torch.ops.fxshard.sum_gradient(grad, group)


differentiate(all_reduce, _backward)

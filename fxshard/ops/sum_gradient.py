"""``fxshard::sum_gradient``: a replicated value enters work that is split over the ranks.

Forward the identity.  Each rank's gradient is only its part of the sum, so the backward is
:mod:`fxshard.ops.all_reduce`: here the Partial gradient of a convolution's weight becomes Replicate::

    weight (Replicate) --> sum_gradient --> convolution of this rank's columns
    gradient, the same <-- all_reduce   <-- gradient from this rank's columns
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.ops.lowering import define, differentiate

if TYPE_CHECKING:
    from torch import Tensor


@define("sum_gradient", "(Tensor x, str group) -> Tensor")
def sum_gradient(x: Tensor, group: str) -> Tensor:  # noqa: ARG001
    """Return a copy of ``x`` whose gradient is summed over the ranks.

    Args:
        x: A value that is the same on every rank.
        group: The name of the process group.

    Returns:
        A copy, because an operator must not return its input; compilers remove it.
    """
    return x.clone()


@sum_gradient.register_fake
def _(x: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _backward(grad: Tensor, group: str) -> Tensor:
    return torch.ops.fxshard.all_reduce(grad, "sum", group)


differentiate(sum_gradient, _backward)

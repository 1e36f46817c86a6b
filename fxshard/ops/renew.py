"""Renewed values: what is written where autograd does not look keeps the gradient of what it was.

::

    with torch.no_grad(): w.mul_(mask)        new = mul(w, mask)             in no_grad
    y = conv(x, w)                            w' = fxshard.renew(w, new)     the value of new, the gradient of w
                                              y = conv(x, w')

In eager mode a write in ``no_grad``, or through ``detach()``, leaves the history of the tensor as it is: the gradient
of the new value is the gradient of the old one, ``dL/dw = dL/dw'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@torch.library.custom_op("fxshard::renew", mutates_args=(), schema="(Tensor old, Tensor new) -> Tensor")
def renew(old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG001  where the gradient goes
    """Return a copy of ``new`` whose gradient is that of ``old``.

    Args:
        old: What the tensor was.
        new: What was written, of the same shape and type.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> (renew(w, w.detach() * 5) * 3).sum().backward()
        >>> w.grad
        tensor([3., 3.])
    """
    return new.clone()


@renew.register_fake
def _(old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(new)


def _backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


renew.register_autograd(_backward)

"""``x.detach()`` in the program of a rule, while it is traced.

Programs are traced below autograd, where torch 2.14 knows no ``detach`` any more, only an alias of its input, through
which a gradient would pass.  A call of this operator stands for it until the program is in the graph::

    x.detach()    traced as    fxshard.detached(x)    spliced as    aten.detach(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import Tensor


@torch.library.custom_op("fxshard::detached", mutates_args=(), schema="(Tensor x) -> Tensor")
def detached(x: Tensor) -> Tensor:
    """Return a copy of ``x`` without its history: what a custom operator returns may not be a view of its input."""
    return x.detach().clone()


@detached.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class DetachKept(TorchFunctionMode):
    """Lets ``x.detach()`` be seen by a tracer below autograd, as :func:`detached`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.detach, torch.detach):
            return torch.ops.fxshard.detached.default(args[0])
        return func(*args, **(kwargs or {}))

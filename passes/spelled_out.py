"""Calls that capture does not see through, spelled out.

Capture sees what an operator's schema says it writes; ``aten::instance_norm`` says nothing and updates the running
statistics inside.  ``aten::dropout`` returns its input where it drops nothing, so capture refuses to write to its
result in either case.  ``x.data`` is no operator at all::

    F.instance_norm(x, mean, var, ...)      ->      mean.lerp_(the instances' mean); var.lerp_(their unbiased variance)
                                                    F.instance_norm(x, None, None, ...)
    F.dropout(x, p)                         ->      F.dropout(x, p).clone(), or x itself
    x.data                                  ->      x.detach()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fxshard._torch import get_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``torch.nn.functional.instance_norm``'s result with its updates written out."""
    if not use_input_stats or running_mean is None or running_var is None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    with torch.no_grad():
        var, mean = torch.var_mean(input, list(range(2, input.ndim)), correction=1)
        for running, new in ((running_mean, mean), (running_var, var)):
            running.copy_((running * (1 - momentum) + momentum * new.mean(0)).to(running.dtype))
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def _aten_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Return ``torch.instance_norm``'s result with its updates written out."""
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return ``torch.nn.functional.dropout``'s result, which may be written to."""
    if not training or p == 0:
        return input
    return F.dropout(input, p, True, inplace) if inplace else F.dropout(input, p).clone()


def _aten_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Return ``torch.dropout``'s result, which may be written to."""
    return _dropout(input, p, train)


SPELLED_OUT: dict[Any, Callable[..., Any]] = {
    F.instance_norm: _instance_norm,
    torch.instance_norm: _aten_instance_norm,
    F.dropout: _dropout,
    torch.dropout: _aten_dropout,
    get_data: torch.detach,
}
"""For a call of a Dynamo graph that capture does not see through, one that it does."""

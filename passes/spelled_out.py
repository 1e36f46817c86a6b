"""Calls that write buffers without saying so in their operator's schema, spelled out for capture.

Capture sees what an operator's schema says it writes.  ``aten::instance_norm`` says nothing and updates the running
statistics inside::

    F.instance_norm(x, mean, var, ...)      ->      mean.lerp_(the instances' mean); var.lerp_(their unbiased variance)
                                                    F.instance_norm(x, None, None, ...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

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


VISIBLE: dict[Any, Callable[..., Any]] = {F.instance_norm: _instance_norm, torch.instance_norm: _aten_instance_norm}
"""For a call of a Dynamo graph that writes buffers unseen, the one that writes them openly."""

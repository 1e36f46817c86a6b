"""Batch norm with ``momentum=None``, in a form that Dynamo can capture.

The running statistics of such a layer are the plain average over all batches so far::

    running <- running + (batch - running) / n          n batches, this one included

torch reads n as a Python number, which ends the graph.  Here n stays a tensor: the layer writes the statistics of
this batch (momentum 1) to copies of its buffers, and the average is taken of those.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fxshard.outer_hooks import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_forward = _BatchNorm.forward


def cumulative_averages(net: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the net's batch norms with ``momentum=None`` can be captured.

    Args:
        net: The model; without such layers nothing is changed.
    """
    return _replaced_forward() if any(map(_averages, batch_norms(net))) else nullcontext()


def batch_norms(net: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms of ``net``, of all kinds."""
    return [module for module in modules_of(net) if isinstance(module, _BatchNorm)]


def _averages(norm: _BatchNorm) -> bool:
    return norm.momentum is None and norm.training and norm.track_running_stats and norm.running_mean is not None


@contextmanager
def _replaced_forward() -> Iterator[None]:
    _BatchNorm.forward = _averaging_forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _BatchNorm.forward = _forward  # type: ignore[method-assign]


def _averaging_forward(norm: _BatchNorm, input: Tensor) -> Tensor:
    if not _averages(norm):
        return _forward(norm, input)
    norm._check_input_dim(input)
    running = (norm.running_mean, norm.running_var)
    mean, var = (old.detach().clone() for old in running if old is not None)
    y = F.batch_norm(input, mean, var, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps)
    assert norm.num_batches_tracked is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        for old, new in zip(running, (mean, var), strict=True):
            assert old is not None
            old.add_((new - old) / norm.num_batches_tracked.to(old.dtype))
    return y

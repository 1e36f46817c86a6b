"""What a library allocates for a time beside the results of a convolution: a guess, from measurements.

cuDNN's fast kernels want channels last.  Where they lie first it makes copies of the input and of the output, or of its
gradient, while it runs; where they lie last it needs next to nothing, but for the layers below
(``tools/bench_workspaces.py``, ``benchmarks/workspaces_h200.json``: torch 2.11, cuDNN 9, H200)::

    in bytes                              channels first        channels last
    1 x 1                                 0                     0
    larger                                input + output        0
    as large as its stride, forward       0                     0
    from fewer than 8 channels, backward  input + output        input + output
    of volumes in float32, backward       input + output        input + output
    depthwise                             0                     0
    depthwise 7 x 7, float32, backward    0                     8 inputs
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import fx

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
FEW_CHANNELS = 8
LARGE_FILTER = 7
INPUTS_OF_LARGE_DEPTHWISE = 8


def workspace_bytes(node: fx.Node, *, channels_last: bool) -> int:
    """Return what a node allocates beside its result while it runs.

    Args:
        node: Any; only convolutions allocate.
        channels_last: Whether the compiler lays channels last whatever the graph says.

    Example:
        >>> graph = torch.fx.Graph()
        >>> x, weight = graph.placeholder("x"), graph.placeholder("weight")
        >>> x.meta["val"], weight.meta["val"] = torch.empty(1, 8, 6, 6), torch.empty(8, 8, 3, 3)
        >>> node = graph.call_function(FORWARD, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
        >>> node.meta["val"] = torch.empty(1, 8, 6, 6)
        >>> workspace_bytes(node, channels_last=False), workspace_bytes(node, channels_last=True)
        (2304, 0)
    """
    if node.target is FORWARD:
        x, weight, _, stride, *_, groups = node.args
        output = node.meta["val"]
    elif node.target is BACKWARD:
        grad, x, weight, _, stride, *_, groups, _ = node.args
        output = grad.meta["val"]  # type: ignore[union-attr]
    else:
        return 0
    image, filters = x.meta["val"], weight.meta["val"]  # type: ignore[union-attr]
    sides = filters.shape[2:]
    is_backward, is_last = node.target is BACKWARD, channels_last or _lies_last(image)
    if groups != 1 and groups == image.shape[1]:
        is_large = min(sides) >= LARGE_FILTER and image.dtype == torch.float32
        return INPUTS_OF_LARGE_DEPTHWISE * image.nbytes if is_large and is_backward and is_last else 0
    if math.prod(sides) == 1:
        return 0
    if is_last and not (is_backward and (image.shape[1] < FEW_CHANNELS or _is_single_volume(image))):
        return 0
    if not is_backward and list(sides) == list(stride):  # type: ignore[arg-type]
        return 0
    copies: int = image.nbytes + output.nbytes
    return copies


def _is_single_volume(image: torch.Tensor) -> bool:
    return image.ndim == 5 and image.dtype == torch.float32


def _lies_last(image: Any) -> bool:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.ndim)
    return order is not None and image.is_contiguous(memory_format=order) and not image.is_contiguous()

"""Where a kernel of fxshard's is faster than the library's, as measured.

The choice is made from shapes, types and the kind of device, on every rank alike: a rank that timed kernels itself
could choose another one than its neighbour, and what all ranks compute whole would differ by rounding.

Faster means on the GPU.  The host takes longer to launch one of these than one of the library's, so where a step waits
for the host they lose: they are switched on by ``kernels=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.depthwise import DEPTHWISE_CONV2D

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx
    from torch._ops import OpOverload

MEASURED = {(9, 0)}
"""Compute capabilities of the GPUs that kernels were compared on: H100, H200."""
TYPES = (torch.bfloat16,)
FILTERS = {(7, 7)}
"""Heights and widths of filters."""


@dataclass(frozen=True)
class Call:
    """What takes the place of an operator's call.

    Args:
        target: An operator of fxshard's.
        args: Its arguments.
    """

    target: OpOverload
    args: tuple[Any, ...]


def depthwise(node: fx.Node) -> Call | None:
    """Return the call of the depthwise kernel for a convolution that has one filter for each channel, and stride 1."""
    x, weight, bias, stride, padding, dilation, groups = (*node.args, *DEFAULTS[len(node.args) :])  # type: ignore[misc]
    values = [n.meta["val"] for n in (x, weight, bias) if n is not None]  # type: ignore[union-attr]
    kernel = values[1].shape[2:]
    fits = (
        groups == values[0].shape[1] == values[1].shape[0]
        and set(_both(stride)) == set(_both(dilation)) == {1}
        and tuple(kernel) in FILTERS
        and all(p < k for k, p in zip(kernel, _both(padding), strict=True))
        and values[0].dtype in TYPES
        and len({v.dtype for v in values}) == 1
    )
    if not (fits and values[0].ndim == 4 and is_faster_on(values[0].device)):
        return None
    return Call(DEPTHWISE_CONV2D, (x, weight, bias, _both(padding)))


DEFAULTS = (None, None, None, 1, 0, 1, 1)
"""Of the arguments of aten's conv2d."""


def _both(value: Any) -> list[int]:
    """Return a value for the height and one for the width."""
    values = [value] if isinstance(value, int) else list(value)
    return values * (2 // len(values))


def is_faster_on(device: torch.device) -> bool:
    """Return whether kernels were measured to be faster on this kind of device, and can be compiled."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) in MEASURED


KERNELS: dict[Any, Callable[[fx.Node], Call | None]] = {torch.ops.aten.conv2d.default: depthwise}
"""By the operator that is replaced."""

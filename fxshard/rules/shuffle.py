"""Shuffles between channels and space: reshapes and permutations, whose rules carry the split.

    pixel_shuffle      (N, C*r*r, H, W) -> (N, C, r, r, H, W) -> (N, C, H, r, W, r) -> (N, C, H*r, W*r)
    pixel_unshuffle    (N, C, H*r, W*r) -> (N, C, H, r, W, r) -> (N, C, r, r, H, W) -> (N, C*r*r, H, W)
    channel_shuffle    (N, g*C, ...)    -> (N, g, C, ...)     -> (N, C, g, ...)     -> (N, C*g, ...)

Splitting H: a shuffle multiplies the bounds by r; an unshuffle asks for bounds that are multiples of r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.rules.rule import Choice, Expand, rule

if TYPE_CHECKING:
    from torch import Tensor

    from fxshard.layout import Placement
    from fxshard.rules.call import OpCall

aten = torch.ops.aten


def _in_order_of(x: Tensor, y: Tensor) -> Tensor:
    """Return ``y`` in the memory format of ``x``, as the fused kernels do."""
    is_channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return y.contiguous(memory_format=torch.channels_last) if is_channels_last else y


@rule(aten.pixel_shuffle.default, nested=True)
def place_pixel_shuffle(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Reshape, permute, reshape."""
    return Expand(_pixel_shuffle)


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    n, split = len(batch), channels // factor**2
    parts = x.reshape(*batch, split, factor, factor, height, width)
    order = [*range(n + 1), n + 3, n + 1, n + 4, n + 2]
    return _in_order_of(x, parts.permute(order).reshape(*batch, split, height * factor, width * factor))


@rule(aten.pixel_unshuffle.default, nested=True)
def place_pixel_unshuffle(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Reshape, permute, reshape."""
    return Expand(_pixel_unshuffle)


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    n, rows, columns = len(batch), height // factor, width // factor
    parts = x.reshape(*batch, channels, rows, factor, columns, factor)
    order = [*range(n + 1), n + 2, n + 4, n + 1, n + 3]
    return _in_order_of(x, parts.permute(order).reshape(*batch, channels * factor**2, rows, columns))


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default, nested=True)
def place_channel_shuffle(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Reshape, transpose, reshape."""
    return Expand(_channel_shuffle)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return _in_order_of(x, parts.transpose(1, 2).reshape(x.shape))

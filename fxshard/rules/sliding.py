"""Sliding windows as dimensions of their own: unfold, im2col, and col2im, which adds them up again.

::

    unfold(dim, k, s)   out[..., o, ..., j] = x[..., s*o + j, ...]      a stencil of kernel k and stride s
    im2col              two unfolds of the padded image; the taps move in front, the positions are flattened
    col2im              the transposed convolution whose kernel of tap (i, j) is 1 there and 0 elsewhere
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fxshard.layout import Placement, Shard
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import per_dim, stencil_shards
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxshard.rules.call import OpCall

aten = torch.ops.aten


@rule(aten.unfold.default, nested=True)
def place_unfold(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch what a rank's windows cover."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dim = call["dimension"] % len(call.shape(0))
    if shard.dim != dim:
        return Row(at, at)
    shards = stencil_shards(shard, Stencil(kernel=call["size"], stride=call["step"]), call.out_shape[dim])
    return shards if isinstance(shards, Gather) else Row((shards[0],), (shards[1],))


@rule(aten.im2col.default, nested=True)
def place_im2col(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Unfold one dimension after the other."""
    return Expand(_im2col)


def _im2col(
    x: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    kernel, gaps, ahead, steps = (per_dim(sizes, 2) for sizes in (kernel_size, dilation, padding, stride))
    y = F.pad(x, [ahead[1], ahead[1], ahead[0], ahead[0]]) if any(ahead) else x
    for dim in (-2, -1):
        y = y.unfold(x.ndim + dim, gaps[dim] * (kernel[dim] - 1) + 1, steps[dim])
        y = y[..., :: gaps[dim]] if gaps[dim] > 1 else y
    first = x.ndim - 2  # (..., C, rows, columns, taps down, taps across)
    y = y.permute(*range(first), first + 2, first + 3, first, first + 1)
    return y.reshape(*x.shape[: first - 1], x.shape[first - 1] * kernel[0] * kernel[1], -1)


@rule(aten.col2im.default, nested=True)
def place_col2im(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Add the windows up by a transposed convolution."""
    return Expand(_col2im)


def _col2im(  # the schema's argument names
    x: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    kernel, gaps, ahead, steps = (per_dim(sizes, 2) for sizes in (kernel_size, dilation, padding, stride))
    spans = [gap * (k - 1) + 1 for gap, k in zip(gaps, kernel, strict=True)]
    counts = [(o + 2 * p - n) // s + 1 for o, p, n, s in zip(output_size, ahead, spans, steps, strict=True)]
    taps = kernel[0] * kernel[1]
    channels = x.shape[-2] // taps
    windows = x.reshape(*x.shape[:-2], channels * taps, *counts)
    weight: Any = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, 1, *kernel).repeat(channels, 1, 1, 1)
    made = [(c - 1) * s - 2 * p + n for c, s, p, n in zip(counts, steps, ahead, spans, strict=True)]
    rest = [o - m for o, m in zip(output_size, made, strict=True)]
    return F.conv_transpose2d(windows, weight, None, steps, ahead, rest, channels, gaps)

"""Depthwise convolution in two dimensions: each channel with a filter of its own, stride 1.

There is nothing to multiply as matrices, and the filter's 49 taps (7 x 7) read each value 49 times.  Channels lie next
to one another in memory, so a program takes a block of them, of some rows, and of a few columns side by side::

    columns     0 1 2 3 4 5 6 7 8 9        of one row and channel, loaded once each
    output 0    t t t t t t t              taps t
    output 1      t t t t t t t
    output 2        t t t t t t t          R outputs: R + 6 loads of 7 R products

The gradient of the input is the same with the filter turned round.  That of the filter is a sum over all images and
places: each program sums some rows for one row of taps, and what they found is added in a fixed order, so that equal
ranks hold equal bits.  Everything is summed in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Tile(NamedTuple):
    """What one program computes.

    Args:
        rows: Of the output, of which each thread has some.
        columns: Outputs side by side.
        channels: Side by side in memory.
        warps: Of the program.
    """

    rows: int
    columns: int
    channels: int
    warps: int


def forward_tile(height: int) -> Tile:
    """Return the tile of a convolution; measured on an H200 (``benchmarks/depthwise_h200.json``).

    Args:
        height: Of the output.
    """
    return Tile(8, 8, 64, 4) if height <= SMALL else Tile(4, 16, 32, 2)


def weight_tile(height: int) -> Tile:
    """Return the tile of a filter's gradient; argument as :func:`forward_tile`'s."""
    return Tile(16, 8, 32, 4) if height <= SMALL else Tile(16, 8, 64, 4)


SMALL = 16
"""Rows of a map that has few programs."""


@triton.jit
def _convolve(
    x,
    taps,
    bias,
    y,
    channels,
    height,
    width,
    out_height,
    out_width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    TURNED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    across = tl.cdiv(out_width, COLUMNS)
    down = tl.cdiv(out_height, ROWS)
    place = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    image = (place // across // down).to(tl.int64)
    row = (place // across) % down * ROWS + tl.arange(0, ROWS)
    column = place % across * COLUMNS
    start = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIAS:
        start += tl.load(bias + c, mask=is_channel, other=0).to(tl.float32)[None, :]
    sums = (start,) * COLUMNS
    for ky in tl.static_range(KH):
        read = row + (ky - PH)
        is_inside = ((read >= 0) & (read < height))[:, None] & is_channel[None, :]
        line = x + (image * height + read)[:, None] * width * channels + c[None, :]
        of_row = ()
        for kx in tl.static_range(KW):
            if TURNED:
                tap = taps + (KH * KW - 1 - ky * KW - kx) * channels
            else:
                tap = taps + (ky * KW + kx) * channels
            of_row = of_row + (tl.load(tap + c, mask=is_channel, other=0).to(tl.float32)[None, :],)
        for j in tl.static_range(COLUMNS + KW - 1):
            at = column + (j - PW)
            loaded = tl.load(line + at * channels, mask=is_inside & (at >= 0) & (at < width), other=0).to(tl.float32)
            added = ()
            for i in tl.static_range(COLUMNS):
                if j - i >= 0 and j - i < KW:
                    added = added + (sums[i] + loaded * of_row[j - i],)
                else:
                    added = added + (sums[i],)
            sums = added
    line = y + (image * out_height + row)[:, None] * out_width * channels + c[None, :]
    is_out = (row < out_height)[:, None] & is_channel[None, :]
    for i in tl.static_range(COLUMNS):
        at = column + i
        tl.store(line + at * channels, sums[i].to(y.dtype.element_ty), mask=is_out & (at < out_width))


@triton.jit
def _correlate(
    grad,
    x,
    partial,
    channels,
    height,
    width,
    out_height,
    out_width,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    down = tl.cdiv(out_height, ROWS)
    place = tl.program_id(0).to(tl.int64)
    ky = tl.program_id(2)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    image = place // down
    row = place % down * ROWS + tl.arange(0, ROWS)
    read = row + ky - PH
    is_out = (row < out_height)[:, None] & is_channel[None, :]
    is_inside = is_out & ((read >= 0) & (read < height))[:, None]
    of_grad = grad + (image * out_height + row)[:, None] * out_width * channels + c[None, :]
    of_x = x + (image * height + read)[:, None] * width * channels + c[None, :]
    sums = (tl.zeros((ROWS, CHANNELS), tl.float32),) * KW
    column = 0
    while column < out_width:
        grads = ()
        for i in tl.static_range(COLUMNS):
            at = column + i
            loaded = tl.load(of_grad + at * channels, mask=is_out & (at < out_width), other=0)
            grads = grads + (loaded.to(tl.float32),)
        for j in tl.static_range(COLUMNS + KW - 1):
            at = column + (j - PW)
            loaded = tl.load(of_x + at * channels, mask=is_inside & (at >= 0) & (at < width), other=0).to(tl.float32)
            added = ()
            for kx in tl.static_range(KW):
                if j - kx >= 0 and j - kx < COLUMNS:
                    added = added + (sums[kx] + loaded * grads[j - kx],)
                else:
                    added = added + (sums[kx],)
            sums = added
        column += COLUMNS
    found = partial + (place * KH + ky) * KW * channels + c
    for kx in tl.static_range(KW):
        tl.store(found + kx * channels, tl.sum(sums[kx], 0), mask=is_channel)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], *, turned: bool = False) -> Tensor:
    """Return the convolution of each channel with its filter.

    Args:
        x: (N, C, H, W), in float32, bfloat16 or float16.
        weight: (C, 1, KH, KW).
        bias: (C,), or None.
        padding: Zeros on both sides of H and W.
        turned: Whether the filter is read from its end: for the gradient of the input.

    Returns:
        (N, C, H + 2 PH - KH + 1, W + 2 PW - KW + 1) of ``x``'s type, channels last.
    """
    images, channels, height, width = x.shape
    (kh, kw), (ph, pw) = weight.shape[2:], padding
    out_height, out_width = height + 2 * ph - kh + 1, width + 2 * pw - kw + 1
    y = _channels_last((images, channels, out_height, out_width), x)
    tile = forward_tile(out_height)
    places = images * triton.cdiv(out_height, tile.rows) * triton.cdiv(out_width, tile.columns)
    if y.numel():
        taps = weight.reshape(channels, kh * kw).t().contiguous()
        _launch(
            _convolve,
            (places, triton.cdiv(channels, tile.channels)),
            tile,
            (x.contiguous(memory_format=torch.channels_last), taps, taps if bias is None else bias, y),
            (channels, height, width, out_height, out_width),
            (kh, kw, ph, pw, turned, bias is not None),
        )
    return y


def correlate(grad: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the gradient of the filters.

    Args:
        grad: Of the output, (N, C, H', W').
        x: The input, (N, C, H, W).
        kernel: KH and KW.
        padding: As it was in :func:`convolve`.

    Returns:
        (C, 1, KH, KW), of ``x``'s type.
    """
    images, channels, height, width = x.shape
    out_height, out_width = grad.shape[2:]
    if not grad.numel():
        return x.new_zeros((channels, 1, *kernel))
    tile = weight_tile(out_height)
    places = images * triton.cdiv(out_height, tile.rows)
    partial = x.new_empty((places, *kernel, channels), dtype=torch.float32)
    _launch(
        _correlate,
        (places, triton.cdiv(channels, tile.channels), kernel[0]),
        tile,
        (*(t.contiguous(memory_format=torch.channels_last) for t in (grad, x)), partial),
        (channels, height, width, out_height, out_width),
        (*kernel, *padding),
    )
    return partial.sum(0).to(x.dtype).permute(2, 0, 1).unsqueeze(1).contiguous()


def _launch(kernel: Any, grid: tuple[int, ...], tile: Tile, *arguments: tuple[Any, ...]) -> None:
    tensors, sizes, constants = arguments
    kernel[grid](*tensors, *sizes, *constants, tile.rows, tile.columns, tile.channels, num_warps=tile.warps)


def _channels_last(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)

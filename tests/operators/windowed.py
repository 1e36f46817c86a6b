"""Operators that read windows of their input: convolutions, pools, resizing and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn

from tests.operators.family import Apply, Family, Options, Shape, divisor, likely, mostly_one, numbers

if TYPE_CHECKING:
    from random import Random

PADDING_MODES = ("zeros", "zeros", "reflect", "replicate", "circular")
INTERPOLATIONS = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}


def draw_conv(chance: Random, shape: Shape) -> Options:
    spatial, channels = len(shape) - 2, shape[1]
    out = chance.choice((1, 2, 3, 4, channels))
    options: Options = {
        "out": out,
        "kernel": numbers(chance, spatial, 1, 7 if spatial < 3 else 4),
        "dilation": mostly_one(chance, spatial, 3),
        "groups": divisor(chance, channels, out) if likely(chance) else 1,
        "bias": likely(chance),
        "padding_mode": chance.choice(PADDING_MODES),
    }
    if likely(chance, 0.3):
        return options | {"padding": chance.choice(("same", "same", "valid"))}
    return options | {"stride": mostly_one(chance, spatial, 4), "padding": numbers(chance, spatial, 0, 4)}


def build_conv(shape: Shape, *, out: int, kernel: Shape, **options: Any) -> nn.Module:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
    conv: nn.Module = kind(shape[1], out, kernel, **options)
    return conv


def draw_conv_transpose(chance: Random, shape: Shape) -> Options:
    spatial, channels = len(shape) - 2, shape[1]
    out = chance.choice((1, 2, 3, channels))
    stride, dilation = numbers(chance, spatial, 1, 4), mostly_one(chance, spatial, 3)
    return {
        "out": out,
        "kernel": numbers(chance, spatial, 1, 5 if spatial < 3 else 3),
        "stride": stride,
        "padding": numbers(chance, spatial, 0, 3),
        "output_padding": tuple(chance.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)),
        "dilation": dilation,
        "groups": divisor(chance, channels, out) if likely(chance) else 1,
        "bias": likely(chance),
    }


def build_conv_transpose(shape: Shape, *, out: int, kernel: Shape, **options: Any) -> nn.Module:
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(shape) - 3]
    conv: nn.Module = kind(shape[1], out, kernel, **options)
    return conv


def _draw_window(chance: Random, shape: Shape) -> Options:
    spatial = len(shape) - 2
    kernel = numbers(chance, spatial, 1, 7 if spatial < 3 else 4)
    return {"kernel_size": kernel, "stride": numbers(chance, spatial, 1, 4) if likely(chance, 0.8) else None}


def draw_max_pool(chance: Random, shape: Shape) -> Options:
    window = _draw_window(chance, shape)
    return window | {
        "padding": tuple(chance.randint(0, k // 2) for k in window["kernel_size"]),
        "dilation": mostly_one(chance, len(shape) - 2, 3),
        "ceil_mode": likely(chance),
        "return_indices": likely(chance, 0.3),
    }


def draw_avg_pool(chance: Random, shape: Shape) -> Options:
    window = _draw_window(chance, shape)
    options = window | {
        "padding": tuple(chance.randint(0, k // 2) for k in window["kernel_size"]),
        "ceil_mode": likely(chance),
        "count_include_pad": likely(chance),
    }
    return options | ({"divisor_override": chance.randint(1, 9)} if len(shape) > 3 and likely(chance, 0.3) else {})


def draw_lp_pool(chance: Random, shape: Shape) -> Options:
    window = _draw_window(chance, shape)
    if len(shape) == 3:  # lp_pool1d takes numbers
        window = {name: sizes and sizes[0] for name, sizes in window.items()}
    return {"norm_type": chance.choice((1.0, 2.0, 3.0)), **window, "ceil_mode": likely(chance)}


def build_pool(kind: str, shape: Shape, **options: Any) -> nn.Module:
    return Apply(getattr(F, f"{kind}{len(shape) - 2}d"), **options)


def build_lp_pool(shape: Shape, **options: Any) -> nn.Module:
    # away from the zeros of its root, where gradients grow without limit
    return nn.Sequential(Apply(lambda x: x.abs() + 1), build_pool("lp_pool", shape, **options))


def draw_adaptive_pool(chance: Random, shape: Shape) -> Options:
    sizes = [chance.choice((1, 2, chance.randint(1, 2 * size), size)) for size in shape[2:]]
    return {"output_size": tuple(sizes) if likely(chance, 0.7) else chance.randint(1, 5)}


def draw_interpolate(chance: Random, shape: Shape) -> Options:
    spatial = len(shape) - 2
    options: Options = {"mode": chance.choice(INTERPOLATIONS[spatial])}
    if options["mode"].endswith(("linear", "cubic")):
        options["align_corners"] = chance.choice((None, False, True))
        if spatial == 2 and not options["align_corners"] and likely(chance, 0.3):
            options["antialias"] = True
    if likely(chance):
        return options | {"size": tuple(chance.randint(1, 2 * size + 1) for size in shape[2:])}
    factors = [chance.choice((0.4, 0.5, 0.75, 1.0, 1.3, 1.5, 2.0, 3.0)) for _ in range(spatial)]
    options["scale_factor"] = tuple(factors) if likely(chance) else factors[0]
    return options | ({"recompute_scale_factor": True} if likely(chance, 0.3) else {})


def build_interpolate(shape: Shape, **options: Any) -> nn.Module:
    return Apply(F.interpolate, **options)


def draw_pad(chance: Random, shape: Shape) -> Options:
    mode = chance.choice(("constant", "reflect", "replicate", "circular"))
    least = -3 if mode in ("constant", "circular") else 0
    pad = tuple(chance.randint(least, 5) for _ in range(2 * (len(shape) - 2)))
    if mode == "circular" and not _wraps(shape, pad):
        mode = "constant"  # ATen leaves memory in the result that it has not written
    return {"pad": pad, "mode": mode} | ({"value": 0.75} if mode == "constant" and likely(chance) else {})


def _wraps(shape: Shape, pad: tuple[int, ...]) -> bool:
    """Return whether a circular padding is no wider than what its own crop leaves."""
    ends = zip(reversed(shape), pad[::2], pad[1::2], strict=False)
    return all(max(before, behind) <= size + min(before, 0) + min(behind, 0) for size, before, behind in ends)


def build_pad(shape: Shape, **options: Any) -> nn.Module:
    return Apply(F.pad, **options)


def draw_unfold(chance: Random, shape: Shape) -> Options:
    return {
        "kernel_size": numbers(chance, 2, 1, 3),
        "stride": mostly_one(chance, 2, 3),
        "padding": numbers(chance, 2, 0, 2),
        "dilation": mostly_one(chance, 2, 2),
    }


def draw_tensor_unfold(chance: Random, shape: Shape) -> Options:
    dim = chance.randrange(2, len(shape))
    return {"dim": dim, "size": chance.randint(1, 4), "step": chance.randint(1, 4)}


def build_tensor_unfold(shape: Shape, *, dim: int, size: int, step: int) -> nn.Module:
    return Apply(lambda x: x.unfold(dim, size, step).sin().mean(-1))


WINDOWED = {
    "conv": Family(draw_conv, build_conv, weight=12),
    "conv_transpose": Family(draw_conv_transpose, build_conv_transpose, weight=5),
    "max_pool": Family(draw_max_pool, lambda shape, **options: build_pool("max_pool", shape, **options), weight=5),
    "avg_pool": Family(draw_avg_pool, lambda shape, **options: build_pool("avg_pool", shape, **options), weight=5),
    "lp_pool": Family(draw_lp_pool, build_lp_pool),
    "adaptive_avg": Family(
        draw_adaptive_pool, lambda shape, **options: build_pool("adaptive_avg_pool", shape, **options), weight=3
    ),
    "adaptive_max": Family(
        draw_adaptive_pool, lambda shape, **options: build_pool("adaptive_max_pool", shape, **options), weight=3
    ),
    "interpolate": Family(draw_interpolate, build_interpolate, weight=6),
    "pad": Family(draw_pad, build_pad, weight=5),
    "unfold": Family(draw_unfold, lambda shape, **options: Apply(F.unfold, **options), spatial=(2,)),
    "tensor_unfold": Family(draw_tensor_unfold, build_tensor_unfold),
}

"""Resizing on ranks equals the untouched operator, without a gather."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool


class Resized(nn.Module):
    """A resize between two convolutions, so that input and output bounds matter."""

    def __init__(self, shape: tuple[int, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        self.before, self.after = conv(shape[1], 2, 3, padding=1), conv(2, 2, 3, padding=1)
        self.kwargs = kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(F.interpolate(torch.tanh(self.before(x)), **self.kwargs))


def resized(shape: tuple[int, ...], **kwargs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    return Resized(shape, kwargs).train(), (torch.randn(*shape),)


def channels_last(shape: tuple[int, ...], **kwargs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    model, (x,) = resized(shape, **kwargs)
    return model.to(memory_format=torch.channels_last), (x.contiguous(memory_format=torch.channels_last),)


LINE, SQUARE, CUBE = (2, 2, 13), (1, 3, 9, 11), (1, 2, 5, 6, 7)
SIZE, AC = (13, 8), {"align_corners": True}
TABLE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "nearest-x2": (SQUARE, {"scale_factor": 2}),
    "nearest-x3-size": (SQUARE, {"size": (27, 33)}),
    "nearest-x1.7": (SQUARE, {"scale_factor": 1.7}),
    "nearest-half": ((1, 3, 10, 12), {"scale_factor": 0.5}),
    "nearest-size": (SQUARE, {"size": SIZE}),
    "nearest-float32-picks": ((1, 2, 30, 26), {"size": (58, 46)}),
    "nearest-float64-picks": ((1, 2, 30, 26), {"size": (58, 90)}),
    "nearest-exact-x2": (SQUARE, {"scale_factor": 2, "mode": "nearest-exact"}),
    "nearest-exact-size": ((1, 2, 24, 16), {"size": (47, 49), "mode": "nearest-exact"}),
    "bilinear-x2": (SQUARE, {"scale_factor": 2, "mode": "bilinear"}),
    "bilinear-x4-size": (SQUARE, {"size": (36, 44), "mode": "bilinear"}),
    "bilinear-x2-corners": (SQUARE, {"scale_factor": 2, "mode": "bilinear", **AC}),
    "bilinear-half": ((1, 3, 10, 12), {"scale_factor": 0.5, "mode": "bilinear"}),
    "bilinear-third": ((1, 3, 9, 12), {"size": (3, 4), "mode": "bilinear"}),
    "bilinear-size": (SQUARE, {"size": SIZE, "mode": "bilinear"}),
    "bilinear-size-corners": (SQUARE, {"size": SIZE, "mode": "bilinear", **AC}),
    "bilinear-x1.3": (SQUARE, {"scale_factor": 1.3, "mode": "bilinear"}),
    "bilinear-x1.3-recomputed": (SQUARE, {"scale_factor": 1.3, "mode": "bilinear", "recompute_scale_factor": True}),
    "bilinear-anisotropic": (SQUARE, {"scale_factor": (0.6, 3.0), "mode": "bilinear"}),
    "bilinear-from-few": ((1, 3, 3, 4), {"size": (40, 31), "mode": "bilinear"}),
    "bilinear-same": (SQUARE, {"size": (9, 11), "mode": "bilinear"}),
    "bicubic-x2": (SQUARE, {"scale_factor": 2, "mode": "bicubic"}),
    "bicubic-size": (SQUARE, {"size": SIZE, "mode": "bicubic"}),
    "bicubic-size-corners": (SQUARE, {"size": SIZE, "mode": "bicubic", **AC}),
    "bicubic-half": ((1, 3, 10, 12), {"scale_factor": 0.5, "mode": "bicubic"}),
    "bilinear-aa-down": ((1, 2, 16, 21), {"size": (7, 6), "mode": "bilinear", "antialias": True}),
    "bilinear-aa-half": ((1, 2, 16, 20), {"scale_factor": 0.5, "mode": "bilinear", "antialias": True}),
    "bilinear-aa-up": (SQUARE, {"scale_factor": 1.7, "mode": "bilinear", "antialias": True}),
    "bicubic-aa-down": ((1, 2, 16, 21), {"size": (7, 6), "mode": "bicubic", "antialias": True}),
    "line-nearest": (LINE, {"size": 22}),
    "line-linear": (LINE, {"size": 22, "mode": "linear"}),
    "line-linear-x2": (LINE, {"scale_factor": 2, "mode": "linear", **AC}),
    "cube-nearest": (CUBE, {"scale_factor": 2}),
    "cube-trilinear": (CUBE, {"scale_factor": (2, 1.5, 2), "mode": "trilinear"}),
    "cube-trilinear-size": (CUBE, {"size": (4, 9, 7), "mode": "trilinear", **AC}),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(n, m) for n, (shape, _) in TABLE.items() for m in [(2,), (3,), (2, 2)] if len(shape) > len(m) + 1],
)
def test_resize_equals_one_device(pool: RankPool, name: str, mesh: tuple[int, ...]) -> None:
    shape, kwargs = TABLE[name]
    dims = (2, 3) if len(mesh) == 2 else (len(shape) - 1,)
    build = functools.partial(resized, shape, **kwargs)
    assert_exact(pool, Case(build, tuple(map(Shard, dims)), mesh, inner_backend="eager"))


@pytest.mark.parametrize("name", ["nearest-float32-picks", "nearest-exact-size", "bilinear-x2", "bicubic-size"])
def test_channels_last(pool: RankPool, name: str) -> None:
    shape, kwargs = TABLE[name]
    build = functools.partial(channels_last, shape, **kwargs)
    assert_exact(pool, Case(build, (Shard(3),), (2,), inner_backend="eager"))


@pytest.mark.parametrize("name", ["nearest-x2", "nearest-half", "bilinear-half", "bilinear-third"])
def test_whole_pixels_need_no_exchange(pool: RankPool, name: str) -> None:
    shape, kwargs = TABLE[name]
    build = functools.partial(_only, shape, **kwargs)
    verdict = assert_exact(pool, Case(build, (Shard(3),), (2,), inner_backend="eager"))
    assert not any("halo" in t or "index" in t for t in verdict.targets), verdict.targets


class _Resize(nn.Module):
    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, **self.kwargs)


def _only(shape: tuple[int, ...], **kwargs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    return _Resize(kwargs), (torch.randn(*shape),)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_factor_that_the_kernels_ignore_is_gathered(pool: RankPool, mode: str) -> None:
    build = functools.partial(_only, (1, 2, 7, 8), scale_factor=1.1, mode=mode)
    verdict = assert_exact(pool, Case(build, (Shard(3),), (2,), inner_backend="eager"), gathers=True)
    assert verdict.reasons[0].endswith("scale factor 1.1 between sizes 7 and 7")


def test_split_batch_is_local(pool: RankPool) -> None:
    build = functools.partial(_only, (5, 2, 7, 8), size=(9, 5), mode="bilinear")
    verdict = assert_exact(pool, Case(build, (Shard(0),), (2,), inner_backend="eager"))
    assert "aten.upsample_bilinear2d.default" in verdict.targets

"""Transposed convolutions on ranks equal the untouched operator, without a gather."""

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

SIZES = {1: (23,), 2: (11, 13), 3: (5, 7, 8)}


class Between(nn.Module):
    """A transposed convolution between two convolutions, so that input and output bounds matter."""

    def __init__(self, dims: int, kernel: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        self.before, self.after = conv(2, 4, 3, padding=1), conv(2, 2, 3, padding=1)
        self.up = transposed(4, 2, kernel, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.up(self.before(x))))


class Base(nn.Module):
    """The form that decompositions use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.convolution(x, self.weight, None, (2, 1), (1, 0), (1, 2), True, (1, 0), 1)
        return torch.convolution(y, self.weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)


def between(dims: int, kernel: Any, batch: int, **kwargs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    return Between(dims, kernel, kwargs).train(), (torch.randn(batch, 2, *SIZES[dims]),)


def base() -> tuple[nn.Module, tuple[Any, ...]]:
    return Base().train(), (torch.randn(1, 2, 9, 10),)


TABLE = [
    ("k2s2", 2, 2, {"stride": 2}),
    ("k4s2p1", 2, 4, {"stride": 2, "padding": 1}),
    ("k3s2-output-padding", 2, 3, {"stride": 2, "padding": 1, "output_padding": 1}),
    ("k3s2p1", 2, 3, {"stride": 2, "padding": 1, "bias": False}),
    ("k5s1p2-dilated", 2, 5, {"padding": 4, "dilation": 2}),
    ("k1s3-gaps", 2, 1, {"stride": 3}),
    ("k2s5-output-padding-gaps", 2, 2, {"stride": 5, "output_padding": 4}),
    ("groups", 2, 3, {"stride": 2, "groups": 2}),
    ("anisotropic", 2, (3, 2), {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2)}),
    ("padding-past-kernel", 2, 2, {"stride": 2, "padding": 3}),
    ("dilation-past-stride", 2, 2, {"stride": 1, "dilation": 4, "output_padding": 3}),
    ("wide-kernel", 2, 9, {"stride": 2, "padding": 3}),
]


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize(("dims", "kernel", "kwargs"), [r[1:] for r in TABLE], ids=[r[0] for r in TABLE])
def test_transposed_equals_one_device(
    pool: RankPool, dims: int, kernel: Any, kwargs: dict[str, Any], mesh: tuple[int, ...]
) -> None:
    placements = (Shard(2), Shard(3)) if len(mesh) == 2 else (Shard(3),)
    build = functools.partial(between, dims, kernel, 1, **kwargs)
    assert_exact(pool, Case(build, placements, mesh, inner_backend="eager"))


@pytest.mark.parametrize(("dims", "split"), [(1, 2), (3, 2), (3, 3), (3, 4)])
def test_other_dimensions(pool: RankPool, dims: int, split: int) -> None:
    kwargs = {"stride": 2, "padding": 1, "output_padding": 1}
    build = functools.partial(between, dims, 3, 1, **kwargs)
    assert_exact(pool, Case(build, (Shard(split),), (2,), inner_backend="eager"))


def test_split_batch_is_local(pool: RankPool) -> None:
    build = functools.partial(between, 2, 3, 5, stride=2)
    verdict = assert_exact(pool, Case(build, (Shard(0),), (2,), inner_backend="eager"))
    assert not any("halo_exchange" in target for target in verdict.targets)


def test_patches_need_no_exchange(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(_patches, (Shard(3),), (3,), inner_backend="eager"))
    assert not any("halo" in t or "aten.slice" in t for t in verdict.targets), verdict.targets


def _patches() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.ConvTranspose2d(2, 3, 4, 4), (torch.randn(1, 2, 5, 13),)


@pytest.mark.parametrize("dim", [2, 3])
def test_base_operator(pool: RankPool, dim: int) -> None:
    assert_exact(pool, Case(base, (Shard(dim),), (2,), inner_backend="eager"))


class Functional(nn.Module):
    """An unbatched image and a kernel from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, self.kernel, stride=(3, 2), padding=1)


def functional() -> tuple[nn.Module, tuple[Any, ...]]:
    return Functional(), (torch.randn(3, 7, 9),)


def test_unbatched(pool: RankPool) -> None:
    assert_exact(pool, Case(functional, (Shard(2),), (3,), inner_backend="eager"))

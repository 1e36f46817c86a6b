"""Pooling windows and bins, borders and positions included."""

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
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool


class Pools(nn.Module):
    """Pools of an image that is the result of split work and has ties."""

    def __init__(self, *functions: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.functions = functions
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Any]:
        image = x * self.scale
        return [function(image) for function in self.functions]


def volume(x: Tensor) -> Tensor:
    """The image as a volume of three slices."""
    return torch.stack([x, x * 2, -x], 2)


def masked(x: Tensor) -> Tensor:
    """The image with -inf in its first rows and columns."""
    hidden = (torch.arange(x.shape[2])[:, None] < 3) | (torch.arange(x.shape[3]) < 3)
    return x.masked_fill(hidden, -torch.inf).detach()


def max_pool(*args: Any, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: F.max_pool2d(x, *args, **options, return_indices=True)


def avg_pool(*args: Any, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: F.avg_pool2d(x, *args, **options)


def adaptive_max(*size: int) -> Callable[[Tensor], Any]:
    return lambda x: F.adaptive_max_pool2d(x, size, return_indices=True)


POOLS: dict[str, tuple[Callable[[Tensor], Any], ...]] = {
    "max": (
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, (3, 2), (2, 3)),
    ),
    "max-ceil": (
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 3, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, 3, 1, dilation=2, ceil_mode=True),
    ),
    "max-indices": (max_pool(2), max_pool(3, 2, 1), max_pool((2, 3), (3, 2)), max_pool(3, 2, 1, dilation=2)),
    "max-indices-ceil": (max_pool(3, 2, ceil_mode=True), max_pool(2, 3, 1, ceil_mode=True)),
    "max-indices-of-masked": (
        lambda x: F.max_pool2d(masked(x), 3, 2, 1, return_indices=True),
        lambda x: F.max_pool2d(masked(x), 3, 1, 1, 2, return_indices=True),
    ),
    "max-indices-unbatched": (lambda x: F.max_pool2d(x[0, None], 3, 2, 1, return_indices=True),),
    "max-3d": (
        lambda x: F.max_pool3d(volume(x), 2, 2, return_indices=True),
        lambda x: F.max_pool3d(volume(x), 3, (1, 2, 2), 1, return_indices=True),
        lambda x: F.max_pool3d(volume(x), 2, 2, 1, ceil_mode=True),
    ),
    "avg": (avg_pool(3, 2, 1), avg_pool(2), avg_pool((3, 2), (2, 3), (1, 0)), avg_pool(1, 2)),
    "avg-excluding-padding": (avg_pool(3, 2, 1, count_include_pad=False), avg_pool(2, 1, 1, count_include_pad=False)),
    "avg-ceil": (
        avg_pool(3, 2, ceil_mode=True),
        avg_pool(3, 2, 1, ceil_mode=True),
        avg_pool(2, 3, 1, ceil_mode=True),
        avg_pool(4, 3, 2, ceil_mode=True, count_include_pad=False),
        avg_pool(3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "avg-divisor": (avg_pool(3, 2, 1, divisor_override=5), avg_pool(2, 3, 1, ceil_mode=True, divisor_override=2)),
    "avg-3d": (
        lambda x: F.avg_pool3d(volume(x), 2, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool3d(volume(x), 3, 2, 1, ceil_mode=True),
        lambda x: F.avg_pool3d(volume(x), 2, 1, divisor_override=3),
    ),
    "lp": (lambda x: F.lp_pool2d(x + 4, 2, 2), lambda x: F.lp_pool2d(x + 4, 3, (3, 2), 1)),
    "adaptive-avg": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
        lambda x: F.adaptive_avg_pool3d(volume(x), (2, 3, 4)),
    ),
    "adaptive-max": (
        adaptive_max(1, 1),
        adaptive_max(3, 4),
        adaptive_max(1, 3),
        adaptive_max(11, 2),
        adaptive_max(2, 13),
    ),
    "adaptive-max-of-masked": (lambda x: F.adaptive_max_pool2d(masked(x), (3, 4), return_indices=True),),
    "adaptive-max-3d": (
        lambda x: F.adaptive_max_pool3d(volume(x), (2, 3, 2), return_indices=True),
        lambda x: F.adaptive_max_pool3d(volume(x), 1),
    ),
    "rows": (
        lambda x: F.max_pool1d(x.transpose(0, 2).flatten(1, 2), 3, 2, 1, return_indices=True),
        lambda x: F.avg_pool1d(x.transpose(0, 2).flatten(1, 2), 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda x: F.adaptive_max_pool1d(x.transpose(0, 2).flatten(1, 2), 3, return_indices=True),
    ),
}
MESHES = {"w-2": ((3,), (2,)), "h-3": ((2,), (3,)), "2x2": ((2, 3), (2, 2)), "n-2": ((0,), (2,))}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Pools(*POOLS[name]), (torch.randint(-3, 4, (2, 3, 11, 13)).double(),)


def case(name: str, mesh: str) -> Case:
    dims, shape = MESHES[mesh]
    return Case(functools.partial(build, name), tuple(Shard(d) for d in dims), shape, steps=1)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", POOLS)
def test_pool_equals_one_device(pool: RankPool, name: str, mesh: str) -> None:
    assert_exact(pool, case(name, mesh))


def build_unpool() -> tuple[nn.Module, tuple[Tensor]]:
    def back(x: Tensor) -> Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2), output_size=x.shape[2:])

    return Pools(back), (torch.randn(2, 3, 11, 13),)


def test_unpooling_is_gathered(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(build_unpool, (Shard(3),), (2,)), gathers=True)
    assert len(verdict.reasons) == 1
    assert "max_unpool2d" in verdict.reasons[0]

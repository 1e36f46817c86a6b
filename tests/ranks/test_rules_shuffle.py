"""Shuffles on ranks equal the untouched operator, without a gather."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool

TABLE = {
    "pixel-shuffle-2": (nn.PixelShuffle(2), (1, 8, 7, 9)),
    "pixel-shuffle-3": (nn.PixelShuffle(3), (2, 9, 5, 6)),
    "pixel-unshuffle-2": (nn.PixelUnshuffle(2), (1, 3, 22, 14)),
    "pixel-unshuffle-3": (nn.PixelUnshuffle(3), (1, 2, 15, 21)),
    "channel-shuffle": (nn.ChannelShuffle(3), (2, 6, 5, 8)),
    "there-and-back": (nn.Sequential(nn.PixelUnshuffle(2), nn.Tanh(), nn.PixelShuffle(2)), (1, 2, 10, 18)),
}


def convolved(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    shuffle, shape = TABLE[name]
    net = nn.Sequential(nn.Conv2d(shape[1], shape[1], 3, padding=1), shuffle, nn.LazyConv2d(2, 3, padding=1))
    x = torch.randn(*shape)
    net(x)
    return net.train(), (x,)


@pytest.mark.parametrize(
    ("dims", "mesh"), [((2,), (2,)), ((3,), (2,)), ((3,), (3,)), ((2, 3), (2, 2))], ids=["H2", "W2", "W3", "HW"]
)
@pytest.mark.parametrize("name", TABLE)
def test_shuffle_equals_one_device(pool: RankPool, name: str, dims: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    placements = tuple(map(Shard, dims))
    assert_exact(pool, Case(functools.partial(convolved, name), placements, mesh, inner_backend="eager"))


def channels_last(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    shuffle, shape = TABLE[name]
    return nn.Sequential(shuffle, nn.Tanh()), (torch.randn(*shape).contiguous(memory_format=torch.channels_last),)


@pytest.mark.parametrize("name", ["pixel-shuffle-2", "pixel-unshuffle-3", "channel-shuffle"])
def test_memory_format_is_kept(pool: RankPool, name: str) -> None:
    case = Case(functools.partial(channels_last, name), (Shard(3),), (2,), inner_backend="eager")
    assert "note" not in assert_exact(pool, case).text

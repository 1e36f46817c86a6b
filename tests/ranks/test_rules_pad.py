"""Padding on ranks equals the untouched operator, without a gather."""

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


class Padded(nn.Module):
    """A padding between two convolutions, as ``F.pad`` or as the operator itself."""

    def __init__(self, shape: tuple[int, ...], arguments: tuple[Any, ...], op: str) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        self.before, self.after = conv(shape[1], 2, 3, padding=1), conv(2, 2, 3, stride=2, bias=False)
        self.arguments, self.op = arguments, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.before(x))
        y = getattr(torch.ops.aten, self.op)(y, *self.arguments) if self.op else F.pad(y, *self.arguments)
        return self.after(y)


def padded(shape: tuple[int, ...], *arguments: Any, op: str = "") -> tuple[nn.Module, tuple[Any, ...]]:
    return Padded(shape, arguments, op).train(), (torch.randn(*shape),)


SQUARE, LINE, CUBE = (1, 2, 9, 11), (2, 2, 17), (1, 2, 5, 6, 7)
TABLE = [
    ("zeros", 3, (SQUARE, (1, 2, 3, 4))),
    ("constant", 3, (SQUARE, (3, 0, 0, 1), "constant", 2.5)),
    ("crop-and-constant", 3, (SQUARE, (-2, 5), "constant", -1.0)),
    ("crop", 3, (SQUARE, (-1, -3, 2, -1))),
    ("crop-most", 3, (SQUARE, (-4, 0))),
    ("reflect", 3, (SQUARE, (2, 1, 3, 0), "reflect")),
    ("reflect-more-than-a-shard", 3, (SQUARE, (10, 9, 1, 1), "reflect")),
    ("replicate", 3, (SQUARE, (2, 15, 1, 3), "replicate")),
    ("circular", 3, (SQUARE, (2, 1, 3, 2), "circular")),
    ("circular-whole", 3, (SQUARE, (11, 11, 9, 9), "circular")),
    ("circular-cropped", 3, (SQUARE, (2, -3, 1, 0), "circular")),
    ("only-the-other-dim", 3, (SQUARE, (0, 0, 2, 1), "reflect")),
    ("line-causal", 2, (LINE, (4, 0))),
    ("line-reflect", 2, (LINE, (3, 2), "reflect")),
    ("line-replicate", 2, (LINE, (1, 4), "replicate")),
    ("line-circular", 2, (LINE, (3, 1), "circular")),
    ("cube-replicate", 2, (CUBE, (1, 2, 2, 1, 3, 1), "replicate")),
    ("cube-reflect", 3, (CUBE, (1, 2, 2, 1, 3, 1), "reflect")),
    ("cube-circular", 4, (CUBE, (1, 2, 2, 1, 3, 1), "circular")),
    ("cube-zeros", 4, (CUBE, (0, 1, 0, 0, 2, 0))),
]
OPERATORS = [
    ("constant_pad_nd", 3, (SQUARE, (1, 2, 0, 1), 0.5)),
    ("reflection_pad1d", 2, (LINE, (2, 3))),
    ("reflection_pad2d", 2, (SQUARE, (2, 3, 1, 0))),
    ("reflection_pad3d", 2, (CUBE, (1, 1, 2, 3, 1, 0))),
    ("replication_pad1d", 2, (LINE, (2, 3))),
    ("replication_pad2d", 2, (SQUARE, (2, 3, 1, 0))),
    ("replication_pad3d", 2, (CUBE, (1, 1, 2, 3, 1, 0))),
    ("_pad_circular", 2, (SQUARE, (2, 3, 1, 0))),
]


@pytest.mark.parametrize("mesh", [(2,), (3,)], ids=str)
@pytest.mark.parametrize(("dim", "arguments"), [r[1:] for r in TABLE], ids=[r[0] for r in TABLE])
def test_pad_equals_one_device(pool: RankPool, dim: int, arguments: tuple[Any, ...], mesh: tuple[int, ...]) -> None:
    case = Case(functools.partial(padded, *arguments), (Shard(dim),), mesh, inner_backend="eager")
    assert_exact(pool, case)


@pytest.mark.parametrize(("op", "dim", "arguments"), OPERATORS, ids=[r[0] for r in OPERATORS])
def test_operator_equals_one_device(pool: RankPool, op: str, dim: int, arguments: tuple[Any, ...]) -> None:
    case = Case(functools.partial(padded, *arguments, op=op), (Shard(dim),), (2,), inner_backend="eager")
    assert_exact(pool, case)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_two_split_dimensions(pool: RankPool, mode: str) -> None:
    build = functools.partial(padded, SQUARE, (2, 3, 1, 2), mode)
    assert_exact(pool, Case(build, (Shard(2), Shard(3)), (2, 2), inner_backend="eager"))


class Channels(nn.Module):
    """Padding of channels and of a mask of integers."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = F.pad((x[:, :1] > 0).to(torch.int64), (1, 1, 1, 1), value=7)
        return F.pad(x, (0, 0, 0, 0, 1, 2)), mask


def channels() -> tuple[nn.Module, tuple[Any, ...]]:
    return Channels(), (torch.randn(*SQUARE),)


def test_channels_and_integers(pool: RankPool) -> None:
    assert_exact(pool, Case(channels, (Shard(3),), (3,), inner_backend="eager"))


def test_zeros_need_no_collective(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(_only_pad, (Shard(3),), (2,), inner_backend="eager"))
    assert [t for t in verdict.targets if "halo" in t] == ["fxshard.halo_exchange.default"]
    assert not any("pad" in t for t in verdict.targets)


def _only_pad() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.ZeroPad2d((1, 2, 0, 0)), (torch.randn(*SQUARE),)

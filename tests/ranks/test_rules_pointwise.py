"""Coordinates that are brought to a map's type: exact and never gathered, whatever their own shape is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact
from tests.ranks.map_models import Mapped, image

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from fxshard.workers import RankPool


def rows(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[2]).type_as(x).view(-1, 1)


def columns(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[3]).to(x)


def grid(x: Tensor) -> Tensor:
    y, z = torch.meshgrid(torch.arange(x.shape[2]), torch.arange(x.shape[3]), indexing="ij")
    return x + torch.cat([torch.stack([y, z]).type_as(x)[None] * x[:, :2], (y - z).to(x).expand(2, 2, -1, -1)], 1)


def pooled(x: Tensor) -> Tensor:
    return x + x.mean((2, 3)).type_as(x)[:, :, None, None] * x.sum(1).type_as(x)[:, None]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"rows": rows, "columns": columns, "grid": grid, "pooled": pooled}
SIZES = ((12, 12), (7, 12), (12, 7))


def build(name: str, size: tuple[int, int]) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(FUNCTIONS[name]), (image(2, 4, *size),)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_takes_the_type_of_a_map_is_exact(pool: RankPool, name: str, size: tuple[int, int], dim: int) -> None:
    assert_exact(pool, Case(functools.partial(build, name, size), (Shard(dim),), steps=1))

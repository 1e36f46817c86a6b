"""Concatenation, stacking and repetition: exact, and no map is gathered for them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fxshard.compare import Case
from tests.ranks.checks import assert_exact
from tests.ranks.map_models import Mapped, image, splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from fxshard.workers import RankPool

TABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "channels-of-other-bounds": lambda x: torch.cat([x[..., 1:, 1:], x[..., :-1, :-1], torch.ones(2, 1, 12, 10)], 1),
    "wrap": lambda x: torch.cat([x[..., -1:], x, x[..., :1]], 3),
    "wrap-rows-and-columns": lambda x: wrapped(wrapped(x, 2), 3),
    "mirror": lambda x: torch.cat([x, x * x], 3),
    "uneven-pieces": lambda x: torch.cat([x[..., 7:], x[..., :3], x, x[:, :, :, 2:4]], -1),
    "rows-and-zeros": lambda x: torch.cat([torch.zeros(2, 4, 5, 11), x], 2) * 1.5,
    "columns-and-scale": lambda x: torch.cat([x, x.mean((2, 3), keepdim=True).expand(-1, -1, 13, 1)], 3),
    "token": lambda x: torch.cat([x.mean((2, 3))[:, :, None], x.sum(3)], 2),
    "batch": lambda x: torch.cat([x, x * 3], 0),
    "stack": lambda x: torch.stack([x, x * 2, torch.ones(2, 4, 13, 11)], 2).sum(2),
    "stack-last": lambda x: torch.stack([x, x[..., 3:4].expand_as(x)], -1).flatten(3),
    "interleave": lambda x: torch.stack([x, x * x], 3).flatten(2, 3),
    "repeat": lambda x: x.repeat(1, 2, 2, 3),
    "repeat-ahead": lambda x: x.repeat(3, 1, 1, 2, 1),
    "tile": lambda x: x.tile(2, 1),
    "repeat-interleave": lambda x: x.repeat_interleave(2, 3).repeat_interleave(3, 2),
    "hstack": lambda x: torch.hstack([x, x * 2]),
}
"""Functions of a map of shape (2, 4, 13, 11)."""


def wrapped(x: Tensor, dim: int) -> Tensor:
    size = x.shape[dim]
    return torch.cat([x.narrow(dim, size - 1, 1), x, x.narrow(dim, 0, 1)], dim)


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(TABLE[name]), (image(2, 4, 13, 11),)


@pytest.mark.parametrize(("name", "placements", "mesh"), splits(TABLE))
def test_join_equals_one_device(pool: RankPool, name: str, placements: Any, mesh: tuple[int, ...]) -> None:
    assert_exact(pool, Case(functools.partial(build, name), placements, mesh, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_ranks_agree_when_compiled(pool: RankPool, backend: str) -> None:
    case = Case(functools.partial(build, "uneven-pieces"), mesh_shape=(3,), inner_backend=backend, steps=1)
    assert_exact(pool, case)

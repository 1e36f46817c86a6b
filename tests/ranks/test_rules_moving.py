"""Rolls, flips, rotations and triangles: exact, and no map is gathered for them."""

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
    "roll": lambda x: x + torch.roll(x, (1, -2), (2, 3)),
    "roll-far": lambda x: x * torch.roll(x, (-40, 8), (3, 2)),
    "roll-twice": lambda x: x * torch.roll(x, (3, 4, 1), (3, 3, 1)),
    "roll-whole-turn": lambda x: x * torch.roll(x, (11, 26), (3, 2)),
    "roll-channels": lambda x: x * torch.roll(x, 1, 1),
    "flip": lambda x: x.flip(3) * 2 + x,
    "flip-all": lambda x: x.flip((1, 2, -1)) * x.fliplr() + x.flip(0),
    "quarter-turn": lambda x: x.rot90(1, (2, 3)),
    "half-turn": lambda x: x.rot90(2, (2, 3)) + x.rot90(4, (2, 3)),
    "three-quarter-turn": lambda x: x.rot90(3, (2, 3)).sin() + x.rot90(-1, (-2, -1)),
    "tril": lambda x: x.tril(-1) + x.triu(2),
    "causal": lambda x: torch.ones(13, 11).tril(1) * x,
    "tril-of-channels": lambda x: x.transpose(1, 3).transpose(1, 2).tril(1),
}
"""Functions of a map of shape (2, 4, 13, 11)."""


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(TABLE[name]), (image(2, 4, 13, 11),)


@pytest.mark.parametrize(("name", "placements", "mesh"), splits(TABLE))
def test_move_equals_one_device(pool: RankPool, name: str, placements: Any, mesh: tuple[int, ...]) -> None:
    assert_exact(pool, Case(functools.partial(build, name), placements, mesh, steps=1))


def build_flat_roll() -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(lambda x: x * torch.roll(x, 5)), (image(2, 4, 13, 11),)


def test_roll_of_the_flattened_map_is_exact(pool: RankPool) -> None:
    assert_exact(pool, Case(build_flat_roll, mesh_shape=(3,)), gathers=None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_ranks_agree_when_compiled(pool: RankPool, backend: str) -> None:
    case = Case(functools.partial(build, "roll-far"), mesh_shape=(3,), inner_backend=backend, steps=1)
    assert_exact(pool, case)

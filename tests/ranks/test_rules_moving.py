"""Rolls, flips, rotations and triangles: exact, and no map is gathered for them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact
from tests.ranks.map_models import Mapped, image, splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

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


class WithTransposed(nn.Module):
    """A map and another one that is split along the other axes, in one sum."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.move = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), move

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        z: Tensor = self.after(y + self.move(y))
        return z


TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(2, 3),
    "quarter-turn": lambda y: torch.rot90(y, 1, (2, 3)),
    "transposed-and-flipped": lambda y: y.mT.flip(3),
}


def build_turned(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return WithTransposed(TURNED[name]), (torch.randn(2, 3, 13, 13),)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["W", "HxW"])
@pytest.mark.parametrize("name", TURNED)
def test_a_map_meets_its_transpose(pool: RankPool, name: str, mesh: tuple[int, ...]) -> None:
    placements = (Shard(3),) if len(mesh) == 1 else (Shard(2), Shard(3))
    assert_exact(pool, Case(functools.partial(build_turned, name), placements, mesh), gathers=None)

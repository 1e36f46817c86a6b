"""Sizes and numbers that only the data tells: what depends on them runs whole on every rank, and is exact."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.compare import Case
from fxshard.errors import FxShardError
from fxshard.workers import mesh
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool


class Reads(nn.Module):
    """A convolution, what is done with its map, and a convolution of the map beside it."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1), read

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.read(y), self.second(y)


def masked_loss(y: Tensor) -> Tensor:
    valid = y[:, 0] > 0
    return F.mse_loss(y[:, 1][valid], y[:, 2][valid])


def hardest_pixels(y: Tensor) -> Tensor:
    losses = y.square().mean(1).flatten()
    return losses[losses > losses.mean()].mean()


def scaled_by_a_number(y: Tensor) -> Tensor:
    return y * y.abs().max().item()


def written_where_masked(y: Tensor) -> Tensor:
    found = y.clone()
    found[y > 0] = y[y > 0] * 2
    return found


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked-loss": masked_loss,
    "hardest-pixels": hardest_pixels,
    "masked-select": lambda y: torch.masked_select(y, y > 0).cumsum(0),
    "nonzero": lambda y: y.flatten()[torch.nonzero(y.flatten() > 0).squeeze(1)].prod(),
    "where": lambda y: torch.where(y > 0)[3].sum() + y.sum(),
    "bincount": lambda y: torch.bincount((y.detach() * 4).abs().long().flatten()),
    "unique": lambda y: torch.unique((y * 2).long()),
    "repeats": lambda y: torch.repeat_interleave(y.flatten(), (y.detach() > 0).long().flatten()).sum(),
    "number": scaled_by_a_number,
    "written": written_where_masked,
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Reads(READS[name]), (torch.randn(2, 3, 7, 19),)


@pytest.mark.parametrize("name", READS)
def test_what_depends_on_data_is_gathered_and_exact(pool: RankPool, name: str) -> None:
    found = assert_exact(pool, Case(functools.partial(build, name)), gathers=True)
    assert any("depends on data" in reason for reason in found.reasons)
    assert found.split


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["masked-loss", "number", "written"])
def test_so_it_is_under_other_backends(pool: RankPool, name: str, backend: str) -> None:
    assert_exact(pool, Case(functools.partial(build, name), inner_backend=backend), gathers=True)


def call_dropping(rank: int, rng: Literal["match", "counter"]) -> str:
    """Call a model that draws as many numbers as only the data tells (runs in a rank process)."""
    torch.compiler.reset()
    model = Reads(lambda y: F.dropout(y[y > 0], 0.5).sum())
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", rng=rng)
    with pytest.raises(FxShardError) as caught:
        net(torch.randn(2, 3, 7, 19))
    return str(caught.value)


@pytest.mark.parametrize("rng", ["match", "counter"])
def test_as_many_draws_as_only_the_data_tells_are_refused(pool: RankPool, rng: str) -> None:
    for text in pool.run(call_dropping, rng, ranks=2):
        assert "aten.dropout.default draws as many random numbers at " in text
        assert "test_data_dependent.py" in text
        assert "draw for the whole tensor, then select" in text


class Masks(nn.Module):
    """Truth values that are gathered, and what is done with them then."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        mask = y > 0
        return mask, torch.where(~torch.fft.ifftshift(mask), y, 0.0)


def build_masks() -> tuple[nn.Module, tuple[Tensor]]:
    return Masks(), (torch.randn(2, 3, 7, 19),)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_truth_values_that_travel_stay_truth_values(pool: RankPool, backend: str) -> None:
    assert_exact(pool, Case(build_masks, inner_backend=backend), gathers=None)

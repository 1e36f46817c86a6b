"""``check_every``: ranks that hold other parameters, buffers or generator states, or are given other images, are told.

Images are compared at the second, fourth, eighth call, too, and said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard import guard
from fxshard.api import transform
from fxshard.errors import PlanError, RankMismatchError
from fxshard.meeting import meetings_so_far
from fxshard.workers import mesh
from tests.ranks.training import logged

if TYPE_CHECKING:
    from fxshard.workers import RankPool

EVERY = 3


def build(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout))


def told(rank: int, what: str, check_every: int) -> tuple[int, str]:
    """Move rank 1 apart after the first call; return which call raises, and what (runs in a rank process)."""
    torch.compiler.reset()
    model = build()
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", check_every=check_every)
    for call in range(1, 2 * EVERY + 1):
        try:
            net(torch.ones(2, 3, 6, 10))
        except RankMismatchError as error:
            return call, str(error)
        if call == 1 and rank == 1:
            with torch.no_grad():
                if what == "parameter":
                    model.get_parameter("0.bias")[2] += 2**-20
                elif what == "buffer":
                    model.get_buffer("1.running_var").mul_(1 + 2**-20)
                elif what == "generator":
                    torch.rand(1)
    return 0, ""


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("parameter", "parameter or buffer 0.bias"),
        ("buffer", "parameter or buffer 1.running_var"),
        ("generator", "generator state"),
    ],
)
def test_ranks_that_moved_apart_are_told_at_the_next_check(pool: RankPool, what: str, name: str) -> None:
    for call, text in pool.run(told, what, EVERY, ranks=2):
        assert call == EVERY
        assert f"{name}: rank 0 has " in text
        assert text.count("rank 0 has ") == 1


def test_ranks_that_hold_the_same_go_on(pool: RankPool) -> None:
    assert pool.run(told, "nothing", EVERY, ranks=2) == [(0, "")] * 2


def test_nothing_is_compared_unless_asked(pool: RankPool) -> None:
    assert pool.run(told, "parameter", 0, ranks=2) == [(0, "")] * 2


def told_of_images(rank: int, check_every: int) -> tuple[int, str, list[str]]:
    """Give rank 1 another image after the first call; return which call raises what, and the log."""
    torch.compiler.reset()
    spatial = mesh((2,))
    net = transform(build(), mesh=spatial, placements=[Shard(3)], inner_backend="eager", check_every=check_every)
    before = meetings_so_far(spatial)  # of the tests before
    with logged() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "meetings_so_far", lambda mesh: meetings_so_far(mesh) - before)
        for call in range(1, 10):
            try:
                net(torch.full((2, 3, 6, 10), 1.0 + (rank if call > 1 else 0)))
            except RankMismatchError as error:
                return call, str(error), lines
    return 0, "", [line for line in lines if line.startswith("WARNING")]


def test_other_images_in_a_later_step_are_said_by_the_first_rank(pool: RankPool) -> None:
    (call, _, lines), (other_call, _, silence) = pool.run(told_of_images, 0, ranks=2)
    assert (call, other_call, silence) == (0, 0, [])
    assert 1 <= len(lines) <= 4  # of eight calls, and the compilation
    assert all("results mix the batches.\n  input args[0]: rank 0 has " in line for line in lines)
    assert all("the same batch" in line for line in lines)


def test_other_images_are_an_error_where_a_check_is_asked_for(pool: RankPool) -> None:
    for call, text, _ in pool.run(told_of_images, EVERY, ranks=2):
        assert call == EVERY
        assert "the ranks disagree:\n  input args[0]: rank 0 has " in text
        assert 'inputs="local"' in text


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="is no number of calls"):
        transform(build(), inner_backend="eager", check_every=wrong)  # type: ignore[arg-type]

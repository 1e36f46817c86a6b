"""The comparison of the rank tests: a model that every rank runs whole does not pass for a split one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool


def narrow() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Conv2d(2, 2, 1), (torch.randn(1, 2, 5, 1),)


def gathered_at_once() -> tuple[nn.Module, tuple[Tensor]]:
    return Sorted(), (torch.randn(1, 2, 5, 8),)


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(3).values.exp()


@pytest.mark.parametrize("build", [narrow, gathered_at_once], ids=lambda build: build.__name__)
def test_a_model_that_every_rank_runs_whole_is_not_exact_but_whole(pool: RankPool, build: object) -> None:
    case = Case(build)  # type: ignore[arg-type]
    assert not assert_exact(pool, case, gathers=True).split
    with pytest.raises(AssertionError, match="every rank ran the whole model"):
        assert_exact(pool, case, gathers=None)

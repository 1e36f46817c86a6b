"""A mesh of one rank changes nothing: the draws are the untouched model's under every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool


class Drawing(nn.Module):
    """Drops out, adds noise, and draws what nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.conv(x), 0.4, self.training)
        torch.rand(3)
        return y + torch.randn_like(y)


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Drawing(), (torch.randn(2, 2, 5, 8),)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_rank_draws_what_the_untouched_model_draws(pool: RankPool, backend: str) -> None:
    assert_exact(pool, Case(build, (Shard(3),), (1,), inner_backend=backend))

"""Recurrent layers over rows of pixels: split rows are gathered, other rows stay where they are; both are exact."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

KINDS: dict[str, Callable[..., nn.Module]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Rows(nn.Module):
    """A recurrent layer that reads each row of a feature map, as in timm's Sequencer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.rows = KINDS[kind](4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        batch, channels, height, width = y.shape
        read, _ = self.rows(y.permute(0, 2, 3, 1).reshape(batch * height, width, channels))
        z: Tensor = self.after(read.reshape(batch, height, width, -1).permute(0, 3, 1, 2))
        return z


def build(kind: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Rows(kind), (torch.randn(2, 3, 6, 9),)


@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        pytest.param(k, d, marks=() if k == "lstm" else pytest.mark.nightly, id=f"{k}-{'HW'[d - 2]}")
        for k in KINDS
        for d in (2, 3)
    ],
)
def test_only_rows_that_are_split_are_gathered(pool: RankPool, kind: str, dim: int) -> None:
    assert_exact(pool, Case(partial(build, kind), (Shard(dim),)), gathers=dim == 3)

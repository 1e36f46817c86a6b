"""Calls that capture does not see through by itself are exact on ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool


class Between(nn.Module):
    """A call between two convolutions."""

    def __init__(self, call: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.call(self.before(x), self.training))
        return y


def dropped_then_written(y: Tensor, training: bool) -> Tensor:
    return F.dropout(y, 0.4, training).relu_()


def written_and_read_again(y: Tensor, training: bool) -> Tensor:
    z = F.dropout(y, 0.4, training)
    z[..., 2:5] *= 2
    return z + y  # in eval mode y is z


def nothing_to_drop(y: Tensor, training: bool) -> Tensor:
    return torch.dropout(y, 0.0, training).mul_(3) + y


def data(y: Tensor, training: bool) -> Tensor:
    return torch.cat([y.data.tanh(), y], 1)[:, 1:4]


CALLS = {f.__name__: f for f in (dropped_then_written, written_and_read_again, nothing_to_drop, data)}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Between(CALLS[name]), (torch.randn(2, 3, 6, 11),)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_exact(pool: RankPool, name: str, *, training: bool) -> None:
    assert_exact(pool, Case(partial(build, name), training=training))

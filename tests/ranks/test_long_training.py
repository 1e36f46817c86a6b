"""Two thousand steps: ranks stay together to the last bit, follow one device, and grow neither memory nor files."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from fxshard.workers import RankPool

STEPS, WARM = 2000, 400
RANKS = 4
MOST_GROWTH = 8 * 2**20
"""Bytes of resident memory from the warm step to the last: allocators round, Python keeps some."""


@dataclass(frozen=True)
class Trained:
    """What a training left.

    Args:
        losses: One for each step.
        weights: Of the trained model.
        growth: Resident memory at the end, less that after the first steps, in bytes.
        files: Open files after the first steps, and at the end.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    growth: int
    files: tuple[int, int]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 5, 2, 2), nn.BatchNorm2d(6), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(6, 6, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def train(net: nn.Module) -> Trained:
    images = torch.randn(8, 2, 3, 10, 26, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.randint(4, (8, 2), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(3)
    losses, memory, files = [], 0, 0
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(net(images[step % 8]), labels[step % 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == WARM:
            memory, files = resident(), open_files()
    growth, open_now = resident() - memory, open_files()
    return Trained(losses, {n: p.detach().clone() for n, p in net.state_dict().items()}, growth, (files, open_now))


def train_on_rank(rank: int) -> Trained:
    torch.compiler.reset()
    net = transform(build(), mesh=mesh((RANKS,)), placements=[Shard(3)], inner_backend="eager", check_every=100)
    return train(net)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_thousand_steps_are_those_of_one_device(pool: RankPool) -> None:
    first, *others = pool.run(train_on_rank, timeout_s=900)
    for other in others:
        torch.testing.assert_close(other.weights, first.weights, rtol=0, atol=0)
    expected = train(build())
    assert expected.losses[-1] < expected.losses[0] / 4
    torch.testing.assert_close(torch.tensor(first.losses), torch.tensor(expected.losses), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(first.weights, expected.weights, rtol=1e-9, atol=1e-9)
    for found in (first, *others):
        assert found.growth < MOST_GROWTH
        assert found.files[1] <= found.files[0]

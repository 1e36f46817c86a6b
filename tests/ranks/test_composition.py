"""What users put around a transformed model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from fxshard.workers import RankPool


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 5, 2, padding=2)).double()


def batch() -> Tensor:
    return torch.randn(4, 3, 8, 21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients_of_half_a_batch_each(rank: int, backend: str) -> list[Tensor]:
    """Train on a 2 x 2 mesh: DDP over the first axis, the width split over the second."""
    axes = mesh((2, 2))
    model = build()
    net = DistributedDataParallel(
        transform(model, mesh=axes["w"], placements=[Shard(3)], inner_backend=backend),
        process_group=axes.get_group("h"),
    )
    half = axes.get_local_rank("h") * 2
    net(batch()[half : half + 2]).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_data_parallel_times_spatial_gives_the_gradients_of_the_whole_batch(pool: RankPool, backend: str) -> None:
    model = build()
    model(batch()).square().mean().backward()
    for found in pool.run(gradients_of_half_a_batch_each, backend):
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)

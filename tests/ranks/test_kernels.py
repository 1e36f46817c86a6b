"""A model whose convolutions run as kernels of fxshard's, on ranks: here as the operators' form for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard import faster
from fxshard.compare import Case
from tests.ranks.checks import Verdict, judge

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from fxshard.workers import RankPool


class Block(nn.Module):
    """What a ConvNeXt has: a depthwise convolution of 7 x 7, channels last behind it, and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.mix = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def blocks() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(4), Block(4)), (torch.randn(2, 3, 11, 27),)


def judge_kernels(rank: int, cases: list[Case]) -> tuple[list[Verdict], int]:
    """Compare with kernels wherever they fit (runs in a rank process); return how many there were, too."""
    made = []

    def everywhere(_: torch.device) -> bool:
        made.append(True)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faster, "is_faster_on", everywhere)
        patch.setattr(faster, "TYPES", (torch.float64,))
        return judge(rank, cases), len(made)


@pytest.mark.parametrize(
    ("placements", "inner_backend"), [((Shard(3),), "aot_eager"), ((Shard(2), Shard(3)), "eager")], ids=str
)
def test_kernels_on_ranks_are_exact(pool: RankPool, placements: tuple[Placement, ...], inner_backend: str) -> None:
    mesh_shape = (2,) * len(placements)
    case = Case(
        build=blocks,
        placements=placements,
        mesh_shape=mesh_shape,
        inner_backend=inner_backend,
        options={"kernels": True},
    )
    for (verdict,), made in pool.run(judge_kernels, [case], ranks=2 ** len(placements)):
        assert verdict.exact, verdict.text
        assert verdict.split
        assert made == 2

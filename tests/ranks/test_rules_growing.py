"""A small value that every rank has, such as a mean over the image, grows into a map in parts, exactly."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

SIZE = (9, 13)


def std_of_groups(x: Tensor) -> Tensor:
    """The standard deviation that EvoNorm divides by."""
    n, c, h, w = x.shape
    grouped = x.reshape(n, 2, c // 2, h, w)
    deviation = (grouped.var((2, 3, 4), keepdim=True) + 1e-3).sqrt()
    return deviation.expand(grouped.shape).reshape(n, c, h, w)


def pooled(bins: int, **kwargs: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(F.adaptive_avg_pool2d(x, bins), SIZE, **kwargs)


# id: what grows of the image
GROWN: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: x.mean((2, 3), keepdim=True).expand_as(x),
    "expand new dims": lambda x: x.mean((0, 2, 3)).exp()[:, None, None].expand(x.shape),
    "expand transposed": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 13, 9).transpose(2, 3),
    "expand permuted": lambda x: x.mean((2, 3))[:, None, None].expand(-1, 9, 13, -1).permute(0, 3, 1, 2),
    "expand reshaped": std_of_groups,
    "expand flat": lambda x: x.mean((2, 3))[:, :, None].expand(-1, -1, 9 * 13).reshape(x.shape),
    "nearest from one": pooled(1),
    "bilinear from one": pooled(1, mode="bilinear"),
    "bilinear from two": pooled(2, mode="bilinear", align_corners=True),
    "bicubic from three": pooled(3, mode="bicubic"),
}


class Grown(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.grow = GROWN[name]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x * self.grow(x).sigmoid())


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Grown(name), (torch.randn(2, 3, *SIZE),)


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize(
    ("placements", "mesh"),
    [((Shard(3),), (3,)), ((Shard(2),), (2,)), ((Shard(2), Shard(3)), (2, 2))],
    ids=["W/3", "H/2", "HxW"],
)
def test_grown_value_is_exact(pool: RankPool, name: str, placements: tuple[Shard, ...], mesh: tuple[int, ...]) -> None:
    case = Case(functools.partial(build, name), placements, mesh)
    verdict = assert_exact(pool, case, gathers=None)
    slices = [target for target in verdict.targets if target == "fxshard.slice.default"]
    assert len(slices) == len(mesh)  # of the image: what grows is nowhere whole

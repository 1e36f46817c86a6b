"""A convolution, then a function of its map: what the tables of the rule tests are about."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SPLITS = (((3,), (3,)), ((2, 3), (2, 2)))
"""(dims, mesh shape) that each function is tried with."""


class Mapped(nn.Module):
    """Convolves, applies the function and mixes the result in, so that gradients pass the function from both sides."""

    def __init__(self, function: Callable[..., Any], channels: int = 4) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Any:
        y = self.function(self.conv(x) * self.scale)
        return torch.sin(y) if isinstance(y, Tensor) and y.is_floating_point() else y


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def splits(names: Iterable[str], of: Iterable[tuple[tuple[int, ...], tuple[int, ...]]] = SPLITS) -> list[Any]:
    """Return a parameter (name, placements, mesh shape) for each name and split."""
    return [
        pytest.param(name, tuple(Shard(d) for d in dims), mesh, id=f"{name}-{dims}-{'x'.join(map(str, mesh))}")
        for name, (dims, mesh) in itertools.product(names, tuple(of))
    ]

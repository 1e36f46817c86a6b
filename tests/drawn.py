"""What is drawn in tests: a model with a skip, a module called twice, and a gather; and one that drops out."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import fxshard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.conv2(self.act(self.norm(self.conv1(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, padding=3)
        self.stages = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).sort(-1).values.mean((2, 3)))


@cache
def drawn() -> fxshard.Plan:
    with torch.device("meta"):
        net, image = Net(), torch.empty(2, 3, 24, 64)
    return fxshard.plan(net, image, world_size=4, inner_backend="aot_eager")


class Dropping(nn.Module):
    """Drops out before and behind two convolutions, that no value skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.early, self.late = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.second(self.first(self.early(x))))


@cache
def dropping() -> fxshard.Plan:
    with torch.device("meta"):
        net, image = Dropping(), torch.empty(2, 3, 24, 64)
    return fxshard.plan(net, image, world_size=4, inner_backend="aot_eager")

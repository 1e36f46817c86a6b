"""An operator next to a connection around it: two branches whose bounds differ meet again.

x ──┬── operator ────────────┬── cat, add or gate
    └── resized to its size ─┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.operators.family import Family, Op, Options, Shape
from tests.operators.mapped import MAPPED
from tests.operators.windowed import WINDOWED

if TYPE_CHECKING:
    from random import Random

INNER = ("conv", "conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg", "pad", "slice", "join", "batch_norm")


class Around(nn.Module):
    """An operator and what goes around it."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Any:
        found = self.inner(x)
        y, *further = found if isinstance(found, tuple) else (found,)
        around = x if x.shape[2:] == y.shape[2:] else F.interpolate(x, size=y.shape[2:])
        if self.kind == "cat":
            joined = torch.cat([around, y], 1)
        elif self.kind == "add":
            joined = y + around.mean(1, keepdim=True)
        else:
            joined = y * torch.sigmoid(around.amax(1, keepdim=True))
        return (joined, *further) if further else joined


def draw_around(chance: Random, shape: Shape) -> Options:
    name = chance.choice(INNER)
    inner = Op(name, **(WINDOWED | MAPPED)[name].draw(chance, shape))
    return {"inner": inner, "kind": chance.choice(("cat", "add", "gate"))}


def build_around(shape: Shape, *, inner: Op, kind: str) -> nn.Module:
    return Around((WINDOWED | MAPPED)[inner.name].build(shape, **inner.options), kind)


BRANCHED = {"around": Family(draw_around, build_around, weight=8)}

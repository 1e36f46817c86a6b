"""Inputs, cases and the reference of the operator tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard.rank_process import mesh
from tests.reference_window import sources

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload


def group(ranks: int) -> str:
    return mesh((ranks,)).get_group().group_name


def values(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank and in the test itself."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(x: Tensor, dim: int, bounds: tuple[int, ...], rank: int) -> Tensor:
    return x.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])


def leaf(x: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    return x.detach().clone(memory_format=memory_format).requires_grad_()


def dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum().detach())


@dataclass(frozen=True)
class Halo:
    """A case: who owns what, and each rank's window."""

    bounds: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> int:
        return len(self.windows)

    @property
    def size(self) -> int:
        return self.bounds[-1]

    def args(self, rank: int, dim: int, mode: str = "constant", value: float = 0.0) -> tuple[Any, ...]:
        lo, hi = ([window[end] for window in self.windows] for end in (0, 1))
        return dim, list(self.bounds), lo, hi, mode, value, rank, group(self.ranks)


def around(bounds: tuple[int, ...], left: int, right: int) -> Halo:
    """Every rank wants ``left`` positions before and ``right`` after what it owns."""
    return Halo(bounds, tuple((lo - left, hi + right) for lo, hi in pairwise(bounds)))


HALOS = {
    "even-2": around((0, 4, 8), 1, 1),
    "uneven-2": around((0, 5, 8), 2, 1),
    "uneven-3": around((0, 2, 7, 11), 2, 1),
    "uneven-4": around((0, 3, 5, 9, 13), 1, 2),
    "left-only-2": around((0, 4, 9), 1, 0),
    "right-only-3": around((0, 4, 6, 9), 0, 2),
    "asymmetric-4": Halo((0, 3, 6, 9, 12), ((-2, 5), (2, 6), (6, 11), (7, 14))),
    "cropped-3": Halo((0, 4, 8, 12), ((1, 3), (4, 8), (9, 11))),
    "shifted-3": Halo((0, 4, 8, 12), ((2, 6), (6, 10), (10, 12))),
    "several-hops-4": around((0, 2, 4, 6, 8), 5, 6),
    "empty-shard-3": around((0, 4, 4, 9), 2, 1),
    "empty-window-3": Halo((0, 4, 8, 12), ((-1, 5), (6, 6), (7, 13))),
    "new-bounds-4": Halo((0, 1, 2, 3, 13), ((0, 4), (4, 7), (7, 10), (10, 13))),
    "all-to-one-2": Halo((0, 4, 8), ((0, 8), (8, 8))),
    "outside-2": Halo((0, 4, 8), ((-3, -1), (3, 11))),
    "one-column-each-3": around((0, 1, 2, 3), 1, 1),
    "both-neighbours-the-same-2": around((0, 3, 6), 3, 3),
}


def windowed(x: Tensor, dim: int, window: tuple[int, int], mode: str, value: float = 0.0) -> Tensor:
    """One process's window, differentiable: the reference."""
    read = sources(window, x.shape[dim], mode)
    index = torch.tensor([max(0, source) for source in read], dtype=torch.long)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    filled = torch.tensor([source < 0 for source in read], dtype=torch.bool).reshape(shape)
    return x.index_select(dim, index).masked_fill(filled, value)


class Kernels(TorchDispatchMode):
    """Records what aten and the collectives write: operator and elements, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[str, int]] = []
        self.collectives: list[tuple[OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self.collectives.append((func, args))
        elif not func.is_view:
            self.written.append((func.overloadpacket.__name__, out.numel()))
        return out

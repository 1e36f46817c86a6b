"""Layouts: who owns which part of a global tensor, one placement per mesh axis.

A placement speaks of one mesh axis with ``n`` ranks::

    Replicate()                      every rank has the whole tensor
    Partial("sum")                   every rank has a term; the tensor is their sum
    Shard(dim, bounds)               rank r has [bounds[r], bounds[r + 1]) of ``dim``

The words are DTensor's; unlike DTensor's ``Shard`` the bounds are explicit, so uneven and
aligned splits are the same case.  Two extensions keep views and stencils inside the type:

``outer``
    A dimension of size ``outer * bounds[-1]`` is read as ``(outer, bounds[-1])`` and the second
    factor is split.  Flattening (H, W) with W split gives ``outer=H``::

        flat index   0 1 2 3 | 4 5 6 7 | 8 9 ...      W = 4, bounds (0, 2, 4), outer = 3
        rank         0 0 1 1   0 0 1 1   0 0 ...

``held``
    The rank *holds* another interval than it owns: a :class:`Window`, per rank ``[lo, hi)`` in global
    coordinates, possibly outside ``[0, size)`` where the fill says what stands there.

Several axes may split one tensor: a rank has the intersection of what the axes give it.
Pure integers: no tensors, ranks of the process or groups live here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Interval: TypeAlias = tuple[int, int]
FillMode: TypeAlias = Literal["constant", "reflect", "replicate", "circular"]


@dataclass(frozen=True)
class Fill:
    """What stands outside ``[0, size)``.

    Args:
        mode: ``torch.nn.functional.pad``'s word for it.
        value: The constant of mode ``"constant"``.
    """

    mode: FillMode = "constant"
    value: float = 0.0


@dataclass(frozen=True)
class Window:
    """Per rank, the half-open interval it holds, in global coordinates.

    Args:
        intervals: ``(lo, hi)`` for each rank of the axis; may reach outside ``[0, size)``.
        fill: What stands there.
    """

    intervals: tuple[Interval, ...]
    fill: Fill = Fill()

    def length(self, rank: int) -> int:
        """Return how many positions ``rank`` holds."""
        lo, hi = self.intervals[rank]
        return hi - lo


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank has one term of a sum."""

    op: Literal["sum"] = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class Shard:
    """Rank ``r`` owns ``[bounds[r], bounds[r + 1])`` of ``dim``.

    Args:
        dim: The tensor dimension, not negative.
        bounds: ``n + 1`` integers, not decreasing, from 0 to the size of the split factor.
        outer: The dimension's size over ``bounds[-1]``: the factor in front of the split one.
        held: What each rank holds, when that is not what it owns.

    Raises:
        ValueError: The dimension is negative, or the bounds decrease or do not begin at 0.
    """

    dim: int
    bounds: tuple[int, ...]
    outer: int = 1
    held: Window | None = None

    def __post_init__(self) -> None:
        if self.dim < 0:
            msg = f"dim must not be negative, got {self.dim}"
            raise ValueError(msg)
        if self.bounds[0] != 0 or any(a > b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            msg = f"bounds must begin at 0 and not decrease, got {self.bounds}"
            raise ValueError(msg)
        if self.held is not None and self.outer != 1:
            msg = "a held window needs outer=1"
            raise ValueError(msg)

    @property
    def ranks(self) -> int:
        """How many ranks the axis has."""
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        """The size of the split factor."""
        return self.bounds[-1]

    def on(self, dim: int) -> Shard:
        """Return the same split of another dimension, without what is held beside what is owned."""
        return Shard(dim, self.bounds, self.outer)

    def interval(self, rank: int) -> Interval:
        """Return what ``rank`` holds of the split factor, half-open, in global coordinates."""
        return self.held.intervals[rank] if self.held else (self.bounds[rank], self.bounds[rank + 1])

    def length(self, rank: int) -> int:
        """Return how many positions of the split factor ``rank`` holds."""
        lo, hi = self.interval(rank)
        return hi - lo

    @property
    def owned(self) -> Shard:
        """The same split without the held window."""
        return Shard(self.dim, self.bounds, self.outer)

    def __str__(self) -> str:
        text = f"S({self.dim}; {','.join(map(str, self.bounds))}"
        if self.outer != 1:
            text += f"; outer={self.outer}"
        if self.held:
            text += "; held=" + ",".join(f"{lo}:{hi}" for lo, hi in self.held.intervals)
        return text + ")"


Placement: TypeAlias = Replicate | Partial | Shard


@dataclass(frozen=True)
class Layout:
    """One placement per mesh axis."""

    axes: tuple[Placement, ...]

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.axes)

    def __getitem__(self, axis: int) -> Placement:
        return self.axes[axis]

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.axes)) + "]"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole tensor."""
        return all(isinstance(p, Replicate) for p in self.axes)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """Return the layout with another placement on ``axis``."""
        return Layout((*self.axes[:axis], placement, *self.axes[axis + 1 :]))

    def shards(self, dim: int) -> tuple[tuple[int, Shard], ...]:
        """Return ``(axis, shard)`` for each axis that splits ``dim``."""
        return tuple((a, p) for a, p in enumerate(self.axes) if isinstance(p, Shard) and p.dim == dim)

    def local_shape(self, shape: Sequence[int], coords: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the rank at ``coords`` holds of a tensor of global ``shape``.

        Args:
            shape: The global shape.
            coords: The rank's coordinate on each mesh axis.

        Example:
            >>> Layout((Shard(1, (0, 2, 5)),)).local_shape((3, 5), (1,))
            (3, 3)
        """
        local = list(shape)
        for axis, placement in enumerate(self.axes):
            if isinstance(placement, Shard):
                held = placement.length(coords[axis])
                local[placement.dim] = local[placement.dim] // max(placement.size, 1) * held  # of nothing, nothing
        return tuple(local)


def replicated(axes: int) -> Layout:
    """Return the layout that is whole on every rank of ``axes`` mesh axes."""
    return Layout((Replicate(),) * axes)


def even_bounds(size: int, ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """Return bounds of nearly equal lengths whose inner ones are multiples of ``multiple``.

    Args:
        size: The size to split.
        ranks: How many parts.
        multiple: What inner bounds are a multiple of.

    Returns:
        ``ranks + 1`` integers from 0 to ``size``.

    Example:
        >>> even_bounds(130, 4, 4)
        (0, 32, 64, 96, 130)
    """
    inner = [min(size, (2 * r * size + ranks * multiple) // (2 * ranks * multiple) * multiple) for r in range(1, ranks)]
    return (0, *inner, size)


def chunk_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Return the bounds of ``torch.chunk``, which are DTensor's.

    Example:
        >>> chunk_bounds(97, 3), chunk_bounds(4, 3)
        ((0, 33, 66, 97), (0, 2, 4, 4))
    """
    step = -(-size // ranks)
    return tuple(min(size, r * step) for r in range(ranks + 1))


def in_chunks(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the nearest layout that a DTensor can hold: chunks, and each dimension split once.

    Args:
        layout: How a plan leaves a value.
        shape: Its global shape.

    Example:
        >>> str(in_chunks(Layout((Shard(1, (0, 64, 97)), Partial())), (8, 97)))
        '[S(1; 0,49,97), R]'
    """
    axes: list[Placement] = []
    for placement in layout:
        taken = {p.dim for p in axes if isinstance(p, Shard)}
        if isinstance(placement, Shard) and placement.outer == 1 and placement.dim not in taken:
            axes.append(Shard(placement.dim, chunk_bounds(shape[placement.dim], placement.ranks)))
        else:
            axes.append(Replicate())
    return Layout(tuple(axes))


def spread_bounds(bounds: Sequence[int]) -> tuple[int, ...] | None:
    """Return the bounds moved apart so that no rank is empty, or None when there are fewer columns than ranks.

    Args:
        bounds: ``n + 1`` integers, not decreasing.

    Example:
        >>> spread_bounds((0, 3, 3, 4))
        (0, 2, 3, 4)
    """
    ranks, size = len(bounds) - 1, bounds[-1]
    if size < ranks:
        return None
    spread = list(bounds)
    for r in range(1, ranks):
        spread[r] = max(spread[r], spread[r - 1] + 1)
    for r in range(ranks - 1, 0, -1):
        spread[r] = min(spread[r], spread[r + 1] - 1)
    return tuple(spread)

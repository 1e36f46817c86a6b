"""Window algebra: which input positions an output interval needs, and who has them.

Choose the output partition first, then ask which input interval it needs.  For a stencil with
kernel k, stride s, padding p and dilation d::

    output [o0, o1)   needs   input [s*o0 - p,  s*(o1 - 1) - p + d*(k - 1) + 1)

The part outside ``[0, size)`` is filled.  One primitive serves convolution, pooling, padding, slices,
rolls, flips and repartitions: *fetch the window of each rank, given who owns what*::

    owned by    |    rank 0     |    rank 1     |    rank 2     |
    position    0               b1              b2              size
    window of rank 1        [lo ------------------- hi)
    pieces of rank 1        |own|      own      |own|
                            of 0     of 1       of 2

:func:`pieces` cuts a window into runs with one owner each; :class:`Exchange` is the whole picture
for every rank, from which both the fetch and its adjoint are executed (``fxshard.ops.halo_exchange``).
Pure integers; a brute-force index loop in the tests is the reference.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fxshard.layout import Fill, Interval, Window, spread_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILLED = -1
"""The owner of positions that nobody owns: they hold the fill's constant."""


@dataclass(frozen=True)
class Stencil:
    """One dimension of a convolution, pooling or strided slice.

    Args:
        kernel: Taps, >= 1.
        stride: Step between outputs, >= 1.
        padding: Filled positions before the first; negative crops.
        dilation: Step between taps, >= 1.
    """

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Positions from the first tap to the last."""
        return self.dilation * (self.kernel - 1)

    def window(self, lo: int, hi: int) -> Interval:
        """Return the input interval that outputs ``[lo, hi)`` need (empty for no output)."""
        first = self.stride * lo - self.padding
        return (first, first if hi <= lo else self.stride * (hi - 1) - self.padding + self.reach + 1)

    def output_bounds(self, bounds: Sequence[int], out_size: int) -> tuple[int, ...] | None:
        """Return output bounds whose kernel centres lie in the owner's input interval.

        Args:
            bounds: Input bounds, ``n + 1`` integers.
            out_size: Output positions.

        Returns:
            ``n + 1`` integers, every rank with at least one output, or None where that cannot be.

        Example:
            >>> Stencil(kernel=3, stride=2, padding=1).output_bounds((0, 19, 37), 19)
            (0, 10, 19)
        """
        # twice the centre of output o is 2*s*o - 2*p + reach; the first o with centre >= b - 1/2
        offset = 2 * self.padding - self.reach - 1
        inner = [min(out_size, max(0, -((-2 * b - offset) // (2 * self.stride)))) for b in bounds[1:-1]]
        return spread_bounds((0, *inner, out_size))

    def input_window(self, out_bounds: Sequence[int], fill: Fill = Fill()) -> Window:
        """Return what each rank needs for its share of ``out_bounds``."""
        pairs = itertools.pairwise(out_bounds)
        return Window(tuple(self.window(lo, hi) for lo, hi in pairs), fill)


@dataclass(frozen=True)
class Piece:
    """A run of a window with one owner.

    Args:
        owner: The rank that owns the sources, or :data:`FILLED`.
        lo: First source position (0 for filled).
        hi: One past the last source position (0 for filled).
        step: +1 as stored, -1 reversed, 0 the one source position repeated.
        count: Positions of the window it covers.
    """

    owner: int
    lo: int
    hi: int
    step: int
    count: int

    @property
    def fetched(self) -> int:
        """Source positions that travel."""
        return self.hi - self.lo


def _source(position: int, size: int, fill: Fill) -> tuple[int, int, int]:
    """Return ``(source, step, run)``: where ``position`` reads, and for how many more positions that goes on."""
    if 0 <= position < size:
        return position, 1, size - position
    if fill.mode == "constant":
        return FILLED, 0, -position if position < 0 else 1 << 62
    if fill.mode == "replicate":
        return (0, 0, -position) if position < 0 else (size - 1, 0, 1 << 62)
    if fill.mode == "circular":
        source = position % size
        return source, 1, size - source
    period = max(1, 2 * (size - 1))  # reflect: ... 2 1 [0 1 2 ... size-1] size-2 ...
    phase = position % period
    if phase < size - 1 or size == 1:
        return phase, 1, size - phase
    return period - phase, -1, period - phase


@lru_cache(maxsize=4096)
def pieces(window: Interval, bounds: tuple[int, ...], fill: Fill = Fill()) -> tuple[Piece, ...]:
    """Cut a window into runs that have one owner each, in window order.

    Args:
        window: Half-open interval in global coordinates, possibly outside ``[0, bounds[-1])``.
        bounds: Who owns what, ``n + 1`` integers.
        fill: What stands outside.

    Returns:
        The pieces; their counts add up to the window's length.

    Example:
        >>> [(p.owner, p.lo, p.hi) for p in pieces((-1, 6), (0, 4, 8))]
        [(-1, 0, 0), (0, 0, 4), (1, 4, 6)]
    """
    return tuple(_runs(window, bounds, fill))


def _runs(window: Interval, bounds: tuple[int, ...], fill: Fill) -> Iterator[Piece]:
    position, end = window
    while position < end:
        source, step, run = _source(position, bounds[-1], fill)
        count = min(run, end - position)
        if source == FILLED:
            yield Piece(FILLED, 0, 0, 0, count)
        else:
            owner = bisect_right(bounds, source) - 1
            if step > 0:
                count = min(count, bounds[owner + 1] - source)
                yield Piece(owner, source, source + count, 1, count)
            elif step < 0:
                count = min(count, source - bounds[owner] + 1)
                yield Piece(owner, source - count + 1, source + 1, -1, count)
            else:
                yield Piece(owner, source, source + 1, 0, count)
        position += count


@dataclass(frozen=True)
class Exchange:
    """A fetch: every rank's pieces.

    Args:
        bounds: Who owns what, ``n + 1`` integers.
        window: What each rank wants.
    """

    bounds: tuple[int, ...]
    window: Window

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.bounds) - 1

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of ``rank``'s window, in window order."""
        return pieces(self.window.intervals[rank], self.bounds, self.window.fill)

    def sent(self, source: int, target: int) -> tuple[Piece, ...]:
        """Return the pieces that ``source`` sends to ``target`` (none to itself), in window order."""
        return () if source == target else tuple(p for p in self.pieces(target) if p.owner == source)

    def columns(self, source: int, target: int) -> int:
        """Return how many positions travel from ``source`` to ``target``."""
        return sum(p.fetched for p in self.sent(source, target))

    def messages(self, rank: int) -> int:
        """Return how many other ranks ``rank`` sends to."""
        return sum(self.columns(rank, t) > 0 for t in range(self.ranks))

    def sent_columns(self, rank: int) -> int:
        """Return how many positions ``rank`` sends in all."""
        return sum(self.columns(rank, t) for t in range(self.ranks))

    @property
    def is_local(self) -> bool:
        """Whether no rank needs anything from another."""
        return not any(self.sent_columns(r) for r in range(self.ranks))

    @property
    def is_identity(self) -> bool:
        """Whether every rank wants exactly what it owns."""
        owned = zip(self.bounds, self.bounds[1:], strict=False)
        return all(w == o for w, o in zip(self.window.intervals, owned, strict=True))

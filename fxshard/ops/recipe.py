"""The recipe of a halo exchange: what one rank does, as integers.

It is made once from the operator's arguments and kept; executing it is left to
:mod:`fxshard.ops.halo_exchange` and, backwards, :mod:`fxshard.ops.halo_accumulate`.

A rank to which nothing comes would not depend on the collective: a compiler finds the collective's result
unused on this rank, removes it, and the other ranks wait for ever.  Such a rank sends itself one of its own
columns, the *anchor*::

    window of rank 0    [ anchor |      own      ]           nothing comes from another rank
                          via the
                          buffer

Where the window has no own column either, the *token* does it: a column that the rank sends itself and that the
result depends on without being changed by it (:func:`fxshard.ops.wire.tied`).  That happens when the map's end is
spread over all ranks: nobody reads what rank 0 owns, and its gradient is zero whatever arrives::

    owned by    |    rank 0     |    rank 1     |    rank 2     |
    windows                                         |0 |1 |2    |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast, get_args

from fxshard.errors import FxShardError
from fxshard.layout import Fill, FillMode, Interval, Window
from fxshard.window import FILLED, Exchange, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Run:
    """A piece of this rank's window.

    Args:
        piece: Who owns it, and where it reads.
        travels: Whether it comes through the buffer.
    """

    piece: Piece
    travels: bool


@dataclass(frozen=True)
class Recipe:
    """What one rank does in a halo exchange.

    Args:
        rank: Which one.
        owned: The interval this rank owns.
        runs: Its window, in order.
        sent: For each rank, the pieces of that rank's window that come from here.
        is_local: Whether no rank needs anything from another, so that there is no collective.
    """

    rank: int
    owned: Interval
    runs: tuple[Run, ...]
    sent: tuple[tuple[Piece, ...], ...]
    is_local: bool

    def received(self, source: int) -> tuple[Piece, ...]:
        """Return the pieces of this rank's window that come through the buffer from ``source``."""
        return tuple(run.piece for run in self.runs if run.travels and run.piece.owner == source)

    @property
    def needs_token(self) -> bool:
        """Whether no column that travels would make the results of this rank depend on the collective."""
        if self.is_local or any(run.piece.owner == self.rank for run in self.runs):
            return False
        return not (any(run.travels for run in self.runs) and any(self.sent))

    @property
    def owned_length(self) -> int:
        """How many positions this rank owns."""
        return self.owned[1] - self.owned[0]

    @property
    def window_length(self) -> int:
        """How many positions this rank's window has."""
        return sum(run.piece.count for run in self.runs)


def halo_recipe(
    bounds: Sequence[int], lo: Sequence[int], hi: Sequence[int], mode: str, value: float, rank: int
) -> Recipe:
    """Return the recipe of ``rank`` for the operator's arguments.

    Args:
        bounds: Who owns what, ``n + 1`` integers.
        lo: For each rank, where its window begins.
        hi: For each rank, where its window ends.
        mode: A :data:`fxshard.layout.FillMode`.
        value: The constant of mode ``"constant"``.
        rank: Whose recipe, in ``[0, n)``.

    Raises:
        FxShardError: The arguments do not fit together.

    Example:
        >>> [(run.piece.owner, run.travels) for run in halo_recipe((0, 4, 8), (-1, 3), (5, 9), "constant", 0.0, 0).runs]
        [(-1, False), (0, False), (1, True)]
    """
    _check(bounds, lo, hi, mode, rank)
    return _recipe(tuple(bounds), tuple(zip(lo, hi, strict=True)), Fill(cast("FillMode", mode), value), rank)


def _check(bounds: Sequence[int], lo: Sequence[int], hi: Sequence[int], mode: str, rank: int) -> None:
    ranks = len(bounds) - 1
    if not (len(lo) == len(hi) == ranks and 0 <= rank < ranks):
        msg = f"halo exchange: {len(lo)} lo and {len(hi)} hi for rank {rank} of {ranks}; one of each per rank is needed"
        raise FxShardError(msg)
    if mode not in get_args(FillMode):
        msg = f"halo exchange: mode {mode!r} is not one of {', '.join(get_args(FillMode))}"
        raise FxShardError(msg)


@lru_cache(maxsize=4096)
def _recipe(bounds: tuple[int, ...], intervals: tuple[Interval, ...], fill: Fill, rank: int) -> Recipe:
    exchange = Exchange(bounds, Window(intervals, fill))
    runs = [Run(piece, piece.owner not in (FILLED, rank)) for piece in exchange.pieces(rank)]
    sent = [exchange.sent(rank, target) for target in range(exchange.ranks)]
    is_local = exchange.is_local
    if not is_local and not (any(run.travels for run in runs) and any(sent)):
        runs = _anchored(runs, rank)
        sent[rank] = tuple(run.piece for run in runs if run.travels and run.piece.owner == rank)
    return Recipe(rank, (bounds[rank], bounds[rank + 1]), tuple(runs), tuple(sent), is_local)


def _anchored(runs: list[Run], rank: int) -> list[Run]:
    """Send one own column through the buffer; a window without own columns stays as it is."""
    own = [i for i, run in enumerate(runs) if run.piece.owner == rank]
    if not own:
        return runs
    at = next((i for i in own if runs[i].piece.step == 1), own[0])
    head, *rest = _cut_first(runs[at].piece)
    return [*runs[:at], Run(head, travels=True), *(Run(piece, travels=False) for piece in rest), *runs[at + 1 :]]


def _cut_first(piece: Piece) -> tuple[Piece, ...]:
    if piece.step != 1 or piece.count == 1:
        return (piece,)
    first = replace(piece, hi=piece.lo + 1, count=1)
    return first, replace(piece, lo=piece.lo + 1, count=piece.count - 1)

"""The window algebra against brute force: numpy.pad for fills, an index loop for stencils."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.layout import Fill, FillMode, Window
from fxshard.window import FILLED, Exchange, Piece, Stencil, pieces
from tests.reference_window import MODES, sources


def fill(mode: str) -> Fill:
    return Fill(cast("FillMode", mode))


def positions(piece: Piece) -> list[int]:
    """The positions that a piece reads, one after the other."""
    if piece.owner == FILLED:
        return [-1] * piece.count
    source = list(range(piece.lo, piece.hi))
    return {1: source, -1: source[::-1], 0: source * piece.count}[piece.step]


@st.composite
def partitions(draw: st.DrawFn, max_size: int = 12, max_ranks: int = 5) -> tuple[int, ...]:
    """Bounds of at least one position, empty shards included."""
    size = draw(st.integers(1, max_size))
    inner = draw(st.lists(st.integers(0, size), max_size=max_ranks - 1))
    return (0, *sorted(inner), size)


@st.composite
def windows(draw: st.DrawFn, size: int) -> tuple[int, int]:
    """Intervals that reach up to three sizes outside."""
    lo = draw(st.integers(-3 * size, 4 * size))
    return lo, draw(st.integers(lo, 4 * size))


@given(st.data(), partitions(), st.sampled_from(MODES))
def test_pieces_read_what_numpy_pads(data: st.DataObject, bounds: tuple[int, ...], mode: str) -> None:
    window = data.draw(windows(bounds[-1]))
    cut = pieces(window, bounds, fill(mode))
    assert [p for piece in cut for p in positions(piece)] == sources(window, bounds[-1], mode)


@given(st.data(), partitions(), st.sampled_from(MODES))
def test_pieces_have_one_owner_and_none_is_empty(data: st.DataObject, bounds: tuple[int, ...], mode: str) -> None:
    for piece in pieces(data.draw(windows(bounds[-1])), bounds, fill(mode)):
        assert piece.count > 0
        if piece.owner != FILLED:
            assert bounds[piece.owner] <= piece.lo < piece.hi <= bounds[piece.owner + 1]
            assert piece.fetched == (piece.count if piece.step else 1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("constant", [-1, -1, -1, 0, 1, 2, 3, -1, -1]),
        ("reflect", [3, 2, 1, 0, 1, 2, 3, 2, 1]),
        ("replicate", [0, 0, 0, 0, 1, 2, 3, 3, 3]),
        ("circular", [1, 2, 3, 0, 1, 2, 3, 0, 1]),
    ],
)
def test_fill_modes(mode: str, expected: list[int]) -> None:
    cut = pieces((-3, 6), (0, 2, 4), fill(mode))
    assert [p for piece in cut for p in positions(piece)] == expected


def test_a_window_outside_of_everything() -> None:
    assert pieces((9, 12), (0, 2, 4)) == (Piece(FILLED, 0, 0, 0, 3),)
    assert pieces((-5, -2), (0, 2, 4)) == (Piece(FILLED, 0, 0, 0, 3),)
    assert pieces((2, 2), (0, 2, 4)) == ()


STENCILS = st.builds(Stencil, st.integers(1, 5), st.integers(1, 4), st.integers(-3, 4), st.integers(1, 3))


@given(STENCILS, st.integers(0, 20), st.integers(0, 12))
def test_stencil_window_is_what_its_taps_read(stencil: Stencil, lo: int, length: int) -> None:
    taps = [
        stencil.stride * out - stencil.padding + stencil.dilation * tap
        for out in range(lo, lo + length)
        for tap in range(stencil.kernel)
    ]
    window = stencil.window(lo, lo + length)
    assert window == ((min(taps), max(taps) + 1) if taps else (window[0], window[0]))


def owner_of_centre(stencil: Stencil, out: int, bounds: tuple[int, ...]) -> int:
    """The rank whose part has the middle tap; a middle between two positions belongs to the later one."""
    twice = 2 * (stencil.stride * out - stencil.padding) + stencil.reach
    centre = min(max(0, (twice + 1) // 2), bounds[-1] - 1)
    return next(r for r, (lo, hi) in enumerate(pairwise(bounds)) if lo <= centre < hi)


@given(STENCILS, partitions(40), st.integers(1, 30))
def test_output_bounds_follow_the_centres(stencil: Stencil, bounds: tuple[int, ...], out_size: int) -> None:
    found = stencil.output_bounds(bounds, out_size)
    owners = [owner_of_centre(stencil, out, bounds) for out in range(out_size)]
    counts = [owners.count(rank) for rank in range(len(bounds) - 1)]
    if out_size < len(counts):
        assert found is None
        return
    assert found is not None
    assert (found[0], found[-1]) == (0, out_size)
    assert all(lo < hi for lo, hi in pairwise(found)), "every rank has an output"
    if all(counts):
        assert [hi - lo for lo, hi in pairwise(found)] == counts


@pytest.mark.parametrize(
    ("stencil", "bounds", "out_size", "expected"),
    [
        pytest.param(Stencil(3, 1, 1), (0, 5, 11), 11, (0, 5, 11), id="same"),
        pytest.param(Stencil(7, 2, 3), (0, 112, 224), 112, (0, 56, 112), id="stem"),
        pytest.param(Stencil(4, 4), (0, 18, 37), 9, (0, 4, 9), id="patch-unaligned"),
        pytest.param(Stencil(2, 2), (0, 1, 2, 4), 2, None, id="fewer-outputs-than-ranks"),
        pytest.param(Stencil(1, 2), (0, 1, 2, 8), 4, (0, 1, 2, 4), id="spread"),
    ],
)
def test_output_bounds(
    stencil: Stencil, bounds: tuple[int, ...], out_size: int, expected: tuple[int, ...] | None
) -> None:
    assert stencil.output_bounds(bounds, out_size) == expected


def test_input_window_has_one_interval_per_rank() -> None:
    window = Stencil(3, 2, 1).input_window((0, 3, 6), Fill(value=7.0))
    assert window == Window(((-1, 6), (5, 12)), Fill(value=7.0))


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    bounds = draw(partitions())
    intervals = tuple(draw(windows(bounds[-1])) for _ in bounds[1:])
    return Exchange(bounds, Window(intervals, fill(draw(st.sampled_from(MODES)))))


@given(exchanges())
def test_exchange_counts_what_it_lists(exchange: Exchange) -> None:
    ranks = range(exchange.ranks)
    sent = {(s, t): exchange.sent(s, t) for s in ranks for t in ranks}
    assert all(p.owner == s for (s, _), listed in sent.items() for p in listed)
    assert not any(sent[r, r] for r in ranks), "own pieces do not travel"
    for rank in ranks:
        columns = [sum(p.hi - p.lo for p in sent[rank, t]) for t in ranks]
        assert exchange.sent_columns(rank) == sum(columns)
        assert exchange.messages(rank) == sum(map(bool, columns))
        wanted = [p for p in exchange.pieces(rank) if p.owner not in (FILLED, rank)]
        assert sorted(wanted, key=repr) == sorted((p for s in ranks for p in sent[s, rank]), key=repr)
    assert exchange.is_local == (not any(sent.values()))


@given(exchanges())
def test_identity_is_what_reads_every_own_position_once(exchange: Exchange) -> None:
    reads = [[p for piece in exchange.pieces(r) for p in positions(piece)] for r in range(exchange.ranks)]
    owned = [list(range(lo, hi)) for lo, hi in pairwise(exchange.bounds)]
    if exchange.is_identity:
        assert reads == owned
    elif all(owned) and exchange.window.fill.mode == "constant":
        assert reads != owned

"""The geometry of slices, joins, rolls and written indices, against loops over positions."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fxshard.layout import Shard, even_bounds
from fxshard.rules.indexing import index_runs
from fxshard.rules.joining import joined_bounds, overlaps
from fxshard.rules.moving import mirrored_window, rolled_window
from fxshard.rules.slicing import balanced, covering, taken_within
from tests.reference_window import sources

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@st.composite
def bounds(draw: st.DrawFn, least: int = 1) -> tuple[int, ...]:
    lengths = draw(st.lists(st.integers(least, 7), min_size=1, max_size=4))
    return (0, *itertools.accumulate(lengths))


@given(st.integers(0, 12), st.integers(0, 20), st.integers(1, 5), bounds())
def test_taken_within_is_what_lies_in_the_interval(start: int, stop: int, step: int, split: tuple[int, ...]) -> None:
    taken = range(split[-1])[start:stop:step]
    parts = [taken_within(taken, interval) for interval in itertools.pairwise(split)]
    for (lo, hi), (first, last) in zip(parts, itertools.pairwise(split), strict=True):
        assert list(taken[lo:hi]) == [p for p in taken if first <= p < last]


@given(SIZES, st.integers(1, 4))
def test_overlaps_tile_the_concatenation(sizes: list[int], ranks: int) -> None:
    split = even_bounds(sum(sizes), ranks)
    joined = [(i, p) for i, size in enumerate(sizes) for p in range(size)]
    parts = [overlaps(sizes, split, i) for i in range(len(sizes))]
    for rank, (lo, hi) in enumerate(itertools.pairwise(split)):
        assert [(i, p) for i, part in enumerate(parts) for p in range(*part[rank])] == joined[lo:hi]


@given(SIZES, st.integers(0, 4), bounds())
def test_joined_bounds_are_balanced_and_complete(before: list[int], at: int, split: tuple[int, ...]) -> None:
    position = min(at, len(before))
    sizes = [*before[:position], split[-1], *before[position:]]
    found = joined_bounds(sizes, position, split)
    assert found is not None, "the input alone has a column for each rank"
    assert (found[0], found[-1], len(found)) == (0, sum(sizes), len(split))
    assert all(a < b for a, b in itertools.pairwise(found))
    assert balanced(found) == found


@given(st.data(), bounds())
def test_a_covering_window_is_never_empty_and_contains_what_is_needed(
    data: st.DataObject, split: tuple[int, ...]
) -> None:
    position = st.integers(0, split[-1])
    needed = [tuple(sorted((data.draw(position), data.draw(position)))) for _ in split[1:]]
    shard = covering(Shard(0, split), needed)  # type: ignore[arg-type]  # pairs
    for rank, (lo, hi) in enumerate(needed):
        held = shard.interval(rank)
        assert held == (lo, hi) if lo < hi else held == (split[rank], split[rank] + 1)


@given(st.integers(-30, 30), bounds())
def test_rolled_window_reads_where_roll_reads(shift: int, split: tuple[int, ...]) -> None:
    size, window = split[-1], rolled_window(split, shift)
    read = [p for interval in window.intervals for p in sources(interval, size, window.fill.mode)]
    assert read == [(i - shift) % size for i in range(size)]


@given(bounds())
def test_mirrored_window_reads_backwards(split: tuple[int, ...]) -> None:
    read = [p for lo, hi in mirrored_window(split).intervals for p in reversed(range(lo, hi))]
    assert read == list(reversed(range(split[-1])))


@given(st.lists(st.integers(0, 9), max_size=12))
def test_index_runs_are_the_indices(indices: list[int]) -> None:
    runs = list(index_runs(indices))
    assert [i for run in runs for i in run] == indices
    assert all(run.step != 0 for run in runs)

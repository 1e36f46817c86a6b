"""Layouts against brute force: the set of elements that each rank has."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Window,
    even_bounds,
    replicated,
    spread_bounds,
)

SPLIT = Shard(1, (0, 2, 5, 9))


@st.composite
def bounds(draw: st.DrawFn, ranks: int | None = None) -> tuple[int, ...]:
    """Bounds of up to four ranks, empty shards included."""
    size = draw(st.integers(1, 7))
    count = draw(st.integers(1, 4)) if ranks is None else ranks
    inner = draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))
    return (0, *sorted(inner), size)


@st.composite
def placements(draw: st.DrawFn, ranks: int, dim: int) -> Placement:
    """Any placement of one axis; a shard splits ``dim``."""
    shard = Shard(dim, draw(bounds(ranks)), draw(st.integers(1, 3)))
    choices: list[Placement] = [Replicate(), Partial(), shard]
    return draw(st.sampled_from(choices))


def elements_along(size: int, shard: Shard, rank: int) -> list[int]:
    """The positions of a split dimension that ``rank`` has, one by one."""
    lo, hi = shard.bounds[rank], shard.bounds[rank + 1]
    return [i for i in range(size) if lo <= i % shard.size < hi]


@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_local_shape_is_the_shape_of_the_elements_that_a_rank_has(data: st.DataObject, mesh_shape: list[int]) -> None:
    layout = Layout(tuple(data.draw(placements(ranks, axis)) for axis, ranks in enumerate(mesh_shape)))
    shape = [p.outer * p.size if isinstance(p, Shard) else 2 for p in layout] + [3]
    for coords in product(*map(range, mesh_shape)):
        kept = [
            elements_along(shape[p.dim], p, coords[axis]) if isinstance(p, Shard) else list(range(shape[axis]))
            for axis, p in enumerate(layout)
        ]
        local = np.zeros(shape)[np.ix_(*kept, range(3))]
        assert layout.local_shape(shape, coords) == local.shape


@given(st.data(), bounds(), st.integers(1, 3))
def test_the_ranks_of_a_shard_have_every_element_once(data: st.DataObject, split: tuple[int, ...], outer: int) -> None:
    shard = Shard(0, split, outer)
    size = outer * shard.size
    owned = [i for rank in range(shard.ranks) for i in elements_along(size, shard, rank)]
    assert sorted(owned) == list(range(size))
    assert sum(outer * shard.length(rank) for rank in range(shard.ranks)) == size


def test_two_axes_that_split_different_dimensions_give_the_intersection() -> None:
    layout = Layout((Shard(0, (0, 1, 4)), Shard(2, (0, 5, 6))))
    assert layout.local_shape((4, 3, 6), (1, 0)) == (3, 3, 5)
    assert layout.local_shape((4, 3, 6), (0, 1)) == (1, 3, 1)


def test_a_held_window_is_what_the_rank_holds_and_the_bounds_what_it_owns() -> None:
    window = Window(((-1, 3), (1, 7)))
    shard = Shard(0, (0, 2, 6), held=window)
    assert [shard.interval(r) for r in (0, 1)] == [(-1, 3), (1, 7)]
    assert [shard.length(r) for r in (0, 1)] == [window.length(0), window.length(1)] == [4, 6]
    assert Layout((shard,)).local_shape((6, 5), (1,)) == (6, 5)
    assert shard.owned == Shard(0, (0, 2, 6))
    assert [shard.owned.interval(r) for r in (0, 1)] == [(0, 2), (2, 6)]


def test_a_shard_says_how_many_ranks_and_positions_it_has() -> None:
    assert (SPLIT.ranks, SPLIT.size) == (3, 9)
    assert [SPLIT.length(r) for r in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("wrong", [(1, 4), (0, 5, 3), (0, 2, 1, 4)], ids=str)
def test_bounds_that_are_no_partition_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"bounds must begin at 0 and not decrease, got \("):
        Shard(0, wrong)


def test_a_dimension_that_is_counted_from_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="dim must not be negative, got -1"):
        Shard(-1, (0, 2, 4))


def test_a_flattened_dimension_holds_no_window() -> None:
    with pytest.raises(ValueError, match="a held window needs outer=1"):
        Shard(0, (0, 1, 2), outer=2, held=Window(((0, 1), (1, 2))))


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Replicate(), "R"),
        (Partial(), "P(sum)"),
        (SPLIT, "S(1; 0,2,5,9)"),
        (Shard(2, (0, 1, 2), 3), "S(2; 0,1,2; outer=3)"),
        (Shard(0, (0, 1, 2), held=Window(((-1, 1), (0, 3)))), "S(0; 0,1,2; held=-1:1,0:3)"),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_placement_prints_on_one_line(placement: Placement, text: str) -> None:
    assert str(placement) == text
    assert str(Layout((placement, Replicate()))) == f"[{text}, R]"


def test_a_layout_answers_about_its_axes() -> None:
    layout = Layout((SPLIT, Partial(), Shard(1, (0, 4, 9)), Shard(0, (0, 1, 2))))
    assert layout.shards(1) == ((0, SPLIT), (2, Shard(1, (0, 4, 9))))
    assert layout[1] == Partial()
    assert list(layout.replace(1, Replicate())) == [SPLIT, Replicate(), layout[2], layout[3]]
    assert not layout.is_replicated
    assert not Layout((Replicate(), Partial())).is_replicated
    assert replicated(3) == Layout((Replicate(), Replicate(), Replicate()))
    assert replicated(2).is_replicated


@given(st.integers(1, 400), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 32]))
def test_even_bounds_are_a_partition_with_inner_bounds_on_multiples(size: int, ranks: int, multiple: int) -> None:
    made = even_bounds(size, ranks, multiple)
    assert len(made) == ranks + 1
    assert (made[0], made[-1]) == (0, size)
    assert all(a <= b for a, b in pairwise(made))
    assert all(b % multiple == 0 or b == size for b in made[1:-1])
    # each inner bound is the multiple nearest to its even place, or the end of the image
    assert all(abs(b - r * size / ranks) <= multiple / 2 for r, b in enumerate(made))


@given(st.integers(1, 400), st.integers(1, 9))
def test_even_bounds_without_alignment_differ_by_one_at_most(size: int, ranks: int) -> None:
    lengths = [b - a for a, b in pairwise(even_bounds(size, ranks))]
    assert {*lengths} <= {size // ranks, math.ceil(size / ranks)}


@given(bounds())
def test_spread_bounds_leave_no_rank_empty(split: tuple[int, ...]) -> None:
    ranks, size = len(split) - 1, split[-1]
    spread = spread_bounds(split)
    if size < ranks:
        assert spread is None
        return
    assert spread is not None
    assert (spread[0], spread[-1], len(spread)) == (0, size, ranks + 1)
    assert all(a < b for a, b in pairwise(spread))
    if all(a < b for a, b in pairwise(split)):
        assert spread == split


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ((0, 0, 0, 5), (0, 1, 2, 5)),
        ((0, 5, 5, 5), (0, 3, 4, 5)),
        ((0, 3, 3, 4), (0, 2, 3, 4)),
        ((0, 2, 2, 9), (0, 2, 3, 9)),
        ((0, 1, 1, 2), None),
    ],
    ids=str,
)
def test_spread_bounds_examples(split: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    assert spread_bounds(split) == expected

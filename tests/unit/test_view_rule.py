"""Reshapes of a split tensor against brute force: each rank's elements before and after, and their order."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.layout import Layout, Shard, even_bounds
from fxshard.rules.view import groups, reshaped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Sizes = tuple[int, ...]


def factorizations(number: int, most: int) -> Iterator[Sizes]:
    """Yield every shape of ``number`` elements with up to ``most`` dimensions, sizes of 1 included."""
    if most == 1:
        yield (number,)
        return
    for size in (d for d in range(1, number + 1) if number % d == 0):
        for rest in factorizations(number // size, most - 1):
            yield (size, *rest)
    yield (number,)


SHAPES = {n: sorted(set(factorizations(n, 4))) for n in (12, 24, 30)}


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Sizes, Sizes]:
    """Two shapes of the same number of elements."""
    shapes = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    return draw(st.sampled_from(shapes)), draw(st.sampled_from(shapes))


@st.composite
def shards(draw: st.DrawFn, shape: Sizes) -> Shard:
    """Any split of any dimension of ``shape`` over two to four ranks, none empty, flattened dimensions included."""
    factors = [(dim, outer) for dim, size in enumerate(shape) for outer in range(1, size) if size % outer == 0]
    dim, outer = draw(st.sampled_from(factors))
    size = shape[dim] // outer
    inner = draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))
    return Shard(dim, (0, *sorted(inner), size), outer)


def part(x: np.ndarray, shard: Shard, rank: int) -> np.ndarray:
    """What ``rank`` has of ``x``, one position of the split dimension after the other."""
    lo, hi = shard.bounds[rank], shard.bounds[rank + 1]
    mine = [i for i in range(x.shape[shard.dim]) if lo <= i % shard.size < hi]
    return np.take(x, mine, axis=shard.dim)


def carries(source: Sizes, target: Sizes, before: Shard, after: Shard) -> bool:
    """Whether every rank gets its part of the reshaped tensor by reshaping its own part."""
    x = np.arange(math.prod(source)).reshape(source)
    for rank in range(before.ranks):
        mine, wanted = part(x, before, rank), part(x.reshape(target), after, rank)
        if mine.size != wanted.size or not np.array_equal(mine.reshape(wanted.shape), wanted):
            return False
    return True


def candidates(target: Sizes, ranks: int, sizes: Sequence[int]) -> Iterator[Shard]:
    """Yield every split of ``target`` that gives the ranks that many elements each."""
    total = math.prod(target)
    for dim, size in enumerate(target):
        for outer in (n for n in range(1, size + 1) if size % n == 0):
            per_position = total * outer // size
            if all(s % per_position == 0 for s in sizes):
                lengths = [s // per_position for s in sizes]
                yield Shard(dim, tuple(sum(lengths[:r]) for r in range(ranks + 1)), outer)


@given(reshapes())
def test_groups_cover_both_shapes_in_order_with_equal_products(shapes: tuple[Sizes, Sizes]) -> None:
    source, target = shapes
    found = list(groups(source, target))
    assert [d for left, _ in found for d in left] == list(range(len(source)))
    assert [d for _, right in found for d in right] == list(range(len(target)))
    for left, right in found:
        assert math.prod(source[d] for d in left) == math.prod(target[d] for d in right)


@given(reshapes())
def test_groups_cannot_be_cut_further(shapes: tuple[Sizes, Sizes]) -> None:
    source, target = shapes
    for left, right in groups(source, target):
        lefts = {math.prod(source[left.start : end]) for end in left[1:]}
        rights = {math.prod(target[right.start : end]) for end in right[1:]}
        whole = math.prod(source[d] for d in left)
        assert lefts & rights <= {1, whole}


@given(st.data(), reshapes())
def test_a_rank_reshapes_its_own_elements(data: st.DataObject, shapes: tuple[Sizes, Sizes]) -> None:
    source, target = shapes
    shard = data.draw(shards(source))
    found = reshaped(source, target, shard)
    if found is None:
        return
    before, after = found
    assert (before.dim, before.outer, before.size) == (shard.dim, shard.outer, shard.size)
    assert after.outer * after.size == target[after.dim]
    assert all(a < b for a, b in pairwise(before.bounds))
    assert carries(source, target, before, after)
    for rank in range(shard.ranks):
        x = np.empty(target)
        assert Layout((after,)).local_shape(target, (rank,)) == part(x, after, rank).shape


@given(st.data(), reshapes())
def test_a_split_that_could_be_carried_as_it_is_is_carried(data: st.DataObject, shapes: tuple[Sizes, Sizes]) -> None:
    source, target = shapes
    shard = data.draw(shards(source))
    x = np.arange(math.prod(source)).reshape(source)
    sizes = [part(x, shard, rank).size for rank in range(shard.ranks)]
    possible = [s for s in candidates(target, shard.ranks, sizes) if carries(source, target, shard, s)]
    if possible:
        found = reshaped(source, target, shard)
        assert found is not None
        assert found[0] == shard, f"moved although {possible[0]} carries it"


@given(st.sampled_from(SHAPES[24]), st.integers(2, 4))
def test_reshaping_there_and_back_is_the_same_split(target: Sizes, ranks: int) -> None:
    source = (2, 12)
    shard = Shard(1, even_bounds(12, ranks))
    there = reshaped(source, target, shard)
    if there is not None and there[0] == shard:
        assert reshaped(target, source, there[1]) == (there[1], shard)


@pytest.mark.parametrize(
    ("source", "target", "shard", "expected"),
    [
        # (N, C, H, W) -> (N, C, H*W): the width is behind the height, the height is in front of the width
        ((2, 3, 4, 6), (2, 3, 24), Shard(3, (0, 2, 6)), (Shard(3, (0, 2, 6)), Shard(2, (0, 2, 6), 4))),
        ((2, 3, 4, 6), (2, 3, 24), Shard(2, (0, 1, 4)), (Shard(2, (0, 1, 4)), Shard(2, (0, 6, 24)))),
        # and back
        ((2, 3, 24), (2, 3, 4, 6), Shard(2, (0, 2, 6), 4), (Shard(2, (0, 2, 6), 4), Shard(3, (0, 2, 6)))),
        # a patch view: bounds between patches move to the nearest one
        ((2, 8), (2, 4, 2), Shard(1, (0, 4, 8)), (Shard(1, (0, 4, 8)), Shard(1, (0, 2, 4)))),
        ((2, 8), (2, 4, 2), Shard(1, (0, 3, 8)), (Shard(1, (0, 4, 8)), Shard(1, (0, 2, 4)))),
        # fewer patches than ranks: the split cannot be carried
        ((2, 8), (2, 2, 4), Shard(1, (0, 2, 5, 8)), None),
        # a dimension in front of the split one is cut across it
        ((3, 4), (2, 6), Shard(1, (0, 2, 4)), None),
        # sizes of 1 come and go
        ((5, 6), (1, 5, 1, 6, 1), Shard(1, (0, 2, 6)), (Shard(1, (0, 2, 6)), Shard(3, (0, 2, 6)))),
        ((1, 5, 1, 6, 1), (5, 6), Shard(1, (0, 2, 5)), (Shard(1, (0, 2, 5)), Shard(0, (0, 2, 5)))),
    ],
    ids=[
        "flatten-width",
        "flatten-height",
        "unflatten",
        "patches",
        "patches-moved",
        "few-patches",
        "cut-across",
        "unsqueeze",
        "squeeze",
    ],
)
def test_examples(source: Sizes, target: Sizes, shard: Shard, expected: tuple[Shard, Shard] | None) -> None:
    assert reshaped(source, target, shard) == expected

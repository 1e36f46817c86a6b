"""The minimum cut against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.cut import Value, cheapest_split, cost_of

LARGEST = 14


def drawn_graph(rng: random.Random, size: int) -> dict[int, Value]:
    """Return a graph in program order: a chain with skips, one reader or many, some nodes of one kind only."""
    readers: dict[int, set[int]] = {n: set() for n in range(size)}
    for n in range(1, size):
        for producer in rng.sample(range(n), k=min(n, rng.choice((1, 1, 2, 3)))):
            readers[producer].add(n)
    values = {}
    for n in range(size):
        split: int | None = rng.randrange(20)
        whole: int | None = rng.randrange(40)
        if rng.random() < 0.15:
            split = None
        elif rng.random() < 0.1:
            whole = None
        scatter = None if rng.random() < 0.2 else rng.randrange(12)
        gather = None if rng.random() < 0.1 else rng.randrange(12)
        needs = tuple(rng.sample(range(n), k=1)) if n and rng.random() < 0.2 else ()
        values[n] = Value(split, whole, gather, scatter, tuple(sorted(readers[n])), needs)
    return values


def least(values: dict[int, Value]) -> int | None:
    """Return the least cost of all choices."""
    choices = (
        frozenset(itertools.compress(values, kept)) for kept in itertools.product((False, True), repeat=len(values))
    )
    return min((cost for choice in choices if (cost := cost_of(values, choice)) is not None), default=None)


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_the_cut_costs_no_more_than_any_choice(seed: int, size: int) -> None:
    values = drawn_graph(random.Random(seed), size)
    expected = least(values)
    if expected is None:
        with pytest.raises(ValueError, match="no choice"):
            cheapest_split(values)
    else:
        assert cost_of(values, cheapest_split(values)) == expected


@pytest.mark.parametrize("seed", range(6))
def test_of_fourteen_nodes_too(seed: int) -> None:
    values = drawn_graph(random.Random(seed), LARGEST)
    assert cost_of(values, cheapest_split(values)) == least(values)


def test_a_value_that_several_read_whole_is_gathered_once() -> None:
    one = Value(0, 100, gather=10, readers=("a", "b", "c"))
    values: dict[str, Value] = {"x": one, **dict.fromkeys("abc", Value(5, 0))}
    split = cheapest_split(values)
    assert split == {"x"}
    assert cost_of(values, split) == 10


def test_a_late_small_part_is_cut_over_and_a_large_one_after_it_is_split_again() -> None:
    values = {
        "large": Value(50, 100, gather=4, readers=("small",)),
        "small": Value(30, 2, scatter=4, gather=4, readers=("again",)),
        "again": Value(50, 100),
    }
    assert cheapest_split(values) == {"large", "again"}

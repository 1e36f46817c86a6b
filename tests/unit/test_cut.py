"""The minimum cut against every choice there is."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.cut import Value, cheapest_split, cost_of
from fxshard.otherwise import Turn, Turns

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


def least_with(values: dict[int, Value], name: int, *, split: bool) -> int | None:
    """Return the least cost of all choices in which a node is as asked."""
    value = dataclasses.replace(values[name], whole=None) if split else dataclasses.replace(values[name], split=None)
    return least({**values, name: value})


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_turning_a_node_is_a_choice_that_costs_what_is_said(seed: int, size: int) -> None:
    values = drawn_graph(random.Random(seed), size)
    best = least(values)
    if best is None:
        return
    chosen = cheapest_split(values)
    turns = Turns(values, chosen)
    for name in values:
        turn, turned = turns.of(name), turns._turned(name)
        assert name in turned
        if turn is None:
            assert cost_of(values, chosen ^ turned) is None
            continue
        assert best + turn.costs == cost_of(values, chosen ^ turned)
        assert turn.with_it == len(turned) - 1
        other = least_with(values, name, split=name not in chosen)
        assert other is not None
        assert 0 <= other - best <= turn.costs


def test_what_needs_a_node_split_turns_with_it() -> None:
    needing = [Value(1, 9, readers=("b",)), Value(1, 9, readers=("c",), needs=("a",)), Value(1, 9, needs=("b",))]
    turns = Turns(dict(zip("abc", needing, strict=True)), frozenset("abc"))
    assert [turns.of(name) for name in "abc"] == [Turn(24, 2), Turn(16, 1), Turn(8, 0)]

"""The recipes of all ranks together: what one sends is what the other expects, and nobody is left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.errors import FxShardError
from fxshard.ops.recipe import Recipe, halo_recipe
from fxshard.window import FILLED
from tests.reference_window import MODES


@st.composite
def recipes(draw: st.DrawFn) -> list[Recipe]:
    size = draw(st.integers(1, 10))
    bounds = (0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size)
    lo = [draw(st.integers(-2 * size, 2 * size)) for _ in bounds[1:]]
    hi = [start + draw(st.integers(0, 2 * size)) for start in lo]
    mode = draw(st.sampled_from(MODES))
    return [halo_recipe(bounds, lo, hi, mode, 0.0, rank) for rank in range(len(lo))]


@given(recipes())
def test_what_is_sent_is_what_is_received(ranks: list[Recipe]) -> None:
    for source, sender in enumerate(ranks):
        for target, receiver in enumerate(ranks):
            assert sender.sent[target] == receiver.received(source)


@given(recipes())
def test_every_rank_depends_on_the_collective(ranks: list[Recipe]) -> None:
    assert len({recipe.is_local for recipe in ranks}) == 1
    for recipe in ranks:
        travels = [run for run in recipe.runs if run.travels]
        if recipe.is_local:
            assert not travels
            assert not recipe.needs_token
        else:
            assert recipe.needs_token or (travels and any(recipe.sent))


@given(recipes())
def test_an_anchor_is_one_own_column_and_only_where_it_is_needed(ranks: list[Recipe]) -> None:
    for recipe in ranks:
        anchors = recipe.sent[recipe.rank]
        others = [run for run in recipe.runs if run.travels and run.piece.owner != recipe.rank]
        given_away = [p for target, sent in enumerate(recipe.sent) if target != recipe.rank for p in sent]
        assert len(anchors) <= 1
        assert not anchors or not others or not given_away
        assert all(piece.fetched == 1 for piece in anchors if piece.step == 1)


def test_the_first_column_of_a_one_sided_border_is_the_anchor() -> None:
    first = halo_recipe((0, 4, 8), (-1, 3), (4, 8), "constant", 0.0, 0)
    runs = [(run.piece.owner, run.piece.lo, run.piece.hi, run.travels) for run in first.runs]
    assert runs == [(FILLED, 0, 0, False), (0, 0, 1, True), (0, 1, 4, False)]
    assert first.window_length == sum(hi - lo for lo, hi in pairwise((-1, 4)))


def test_a_rank_that_nobody_reads_and_that_keeps_nothing_needs_a_token() -> None:
    ranks = [halo_recipe((0, 4, 8, 12), (8, 9, 10), (9, 10, 12), "constant", 0.0, rank) for rank in range(3)]
    assert [recipe.needs_token for recipe in ranks] == [True, True, False]


@pytest.mark.parametrize(
    ("lo", "mode", "rank", "message"),
    [
        ((0,), "constant", 0, "1 lo and 2 hi for rank 0 of 2"),
        ((0, 4), "constant", 2, "2 lo and 2 hi for rank 2 of 2"),
        ((0, 4), "mirror", 0, "mode 'mirror' is not one of constant, reflect, replicate, circular"),
    ],
)
def test_refusals(lo: tuple[int, ...], mode: str, rank: int, message: str) -> None:
    with pytest.raises(FxShardError, match=message):
        halo_recipe((0, 4, 8), lo, (4, 8), mode, 0.0, rank)

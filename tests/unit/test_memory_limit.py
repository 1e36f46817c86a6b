"""The mesh that a limit of memory needs is the smallest, found with few plans, and not more than the image has."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import pytest

from fxshard.errors import PlanError
from fxshard.memory import Memory, Moment
from fxshard.memory_limit import GIB, Limit

FIXED = 100


@dataclass(frozen=True)
class Planned:
    """A plan that needs so much.

    Args:
        memory: Of a rank.
    """

    memory: Memory


def peak_of(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return what a rank needs: its part of an image with a rim, and what is whole everywhere."""
    parts = [math.ceil(size / ranks) for size, ranks in zip(sizes, shape, strict=True)]
    return FIXED + 10 * math.prod(part + 2 * (ranks > 1) for part, ranks in zip(parts, shape, strict=True))


def limit(sizes: tuple[int, ...], peak: int) -> tuple[Limit[Planned], list[tuple[int, ...]]]:
    """Return a limit on a peak, in bytes, and where the meshes are noted for which it plans."""
    tried: list[tuple[int, ...]] = []

    def split(shape: tuple[int, ...]) -> Planned:
        tried.append(shape)
        moment = Moment("forward", "conv", peak_of(shape, sizes), "")
        return Planned(Memory(FIXED, 0, 0, 0, (moment,)))

    return Limit(peak / GIB, lambda shape: [split(shape)], split, sizes), tried


def refusal(sizes: tuple[int, ...], asked: tuple[int, ...], peak: int) -> tuple[str, int]:
    """Return what is said of a mesh that needs more than a peak, and how many meshes were tried."""
    found, tried = limit(sizes, peak)
    with pytest.raises(PlanError) as refused:
        found.quickest(asked)
    return str(refused.value), len(tried)


@pytest.mark.parametrize("columns", [23, 36, 44, 1000])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.99])
def test_no_smaller_number_of_ranks_is_enough(columns: int, share: float) -> None:
    peak = round(share * peak_of((2,), (columns,)) + (1 - share) * peak_of((columns,), (columns,)))
    said, tried = refusal((columns,), (2,), peak)
    smallest = next(n for n in range(3, columns + 1) if peak_of((n,), (columns,)) <= peak)
    assert f": {smallest} ranks are needed, and fewer are not enough" in said
    assert tried < 16


@pytest.mark.parametrize(("asked", "wanted"), [((2, 2), (3, 3)), ((1, 2), (2, 4)), ((2, 3), (5, 3))])
def test_a_mesh_of_two_axes_grows_on_both(asked: tuple[int, int], wanted: tuple[int, int]) -> None:
    sizes = (60, 60)
    peak = peak_of(wanted, sizes)
    said, _ = refusal(sizes, asked, peak)
    meshes = itertools.product(*(range(n, 61) for n in asked))
    smallest = min(math.prod(mesh) for mesh in meshes if peak_of(mesh, sizes) <= peak)
    mesh = re.search(r"(\d+) ranks, a mesh of (\d+) x (\d+), are needed, and fewer are not enough", said)
    assert mesh is not None, said
    assert int(mesh[1]) == int(mesh[2]) * int(mesh[3]) == smallest


def test_what_was_not_looked_at_is_not_claimed() -> None:
    said, tried = refusal((600, 600), (2, 2), peak_of((20, 20), (600, 600)))
    assert re.search(r"a mesh of \d+ x \d+, are enough;", said)
    assert tried < 80


def test_more_ranks_than_columns_are_not_tried() -> None:
    said, tried = refusal((30,), (2,), peak_of((30,), (30,)) - 1)
    assert "more ranks, up to 30, need more than that, too" in said
    assert tried < 8


def test_what_is_whole_on_every_rank_cannot_be_split() -> None:
    said, tried = refusal((30,), (2,), FIXED)
    assert "no number of ranks is enough: use FSDP" in said
    assert tried == 1


def test_the_first_plan_that_keeps_to_the_limit_is_taken() -> None:
    found, tried = limit((30,), 10**6)
    assert found.quickest((2,)).memory.peak.bytes == peak_of((2,), (30,))
    assert tried == [(2,), (2,)]

"""Rank tests: real gloo processes, started once per run and fed cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fxshard.workers import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLD_SIZE = 4


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks with every 1-D mesh and the 2 x 2 mesh."""
    with RankPool(WORLD_SIZE) as ranks:
        yield ranks

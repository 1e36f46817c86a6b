"""Rank tests: real gloo processes, started once per run and fed cases.

The tables of the rule families are (row x mesh).  For every change each row runs on one mesh, the meshes in
turn, and of a long table each fourth row; nightly (``-m "nightly or not nightly"``) each row runs on all meshes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from fxshard.workers import RankPool, default_meshes
from tests.operators.configuration import MESHES

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLD_SIZE = 4
SPLIT_PARAMETERS = ("mesh", "placements", "ranks")
"""How the tables name the split that a row is run with."""
LONG_TABLE = 8
"""More rows than this take too long for every change: the drawn operators (``test_operators.py``) are as many more."""
WHOLE_TABLES = ("test_cases.py", "test_models.py", "test_pages.py", "test_composition_page.py")
"""Files that say row by row what is for the night."""


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four ranks with every 1-D mesh, the 2 x 2 mesh and those of the drawn operators."""
    device = request.config.getoption("--rank-device")
    with RankPool(WORLD_SIZE, device=device, meshes=sorted({*default_meshes(WORLD_SIZE), *MESHES})) as ranks:
        yield ranks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave each row of a rule table on one of its meshes, in turn, and mark the others nightly; thin long tables."""
    _rotate(items)
    _thin(items)


def _rotate(items: list[pytest.Item]) -> None:
    rows: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.name.startswith("test_rules_") and any(name in parameters for name in SPLIT_PARAMETERS):
            row = {name: str(value) for name, value in parameters.items() if name not in SPLIT_PARAMETERS}
            rows[item.nodeid.partition("[")[0], str(row)].append(item)
    for turn, variants in enumerate(rows.values()):
        for position, item in enumerate(variants):
            if position != turn % len(variants):
                item.add_marker(pytest.mark.nightly)


def _thin(items: list[pytest.Item]) -> None:
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_table = item.path.parent.name == "ranks" and item.path.name not in WHOLE_TABLES and "[" in item.nodeid
        if of_table and item.get_closest_marker("nightly") is None:
            tables[item.nodeid.partition("[")[0]].append(item)
    for table in tables.values():
        if len(table) > LONG_TABLE:
            for item in (item for place, item in enumerate(table) if place % 4):
                item.add_marker(pytest.mark.nightly)

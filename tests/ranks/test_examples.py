"""The examples run on CPU ranks, as their page says to start them, and say the same on every rank."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.ranks.torchrun import said_by_each_rank

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTED = r"`torchrun --nproc-per-node (\d) examples/(\w+\.py)`"
RANKS = {name: int(ranks) for ranks, name in re.findall(STARTED, (EXAMPLES / "README.md").read_text())}
EACH_CHANGE = ("segmentation.py",)


def test_the_page_has_every_example() -> None:
    assert set(RANKS) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in EACH_CHANGE else pytest.param(n, marks=pytest.mark.nightly) for n in sorted(RANKS)]
)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("timm") if name == "wide_camera.py" else None
    said = said_by_each_rank(EXAMPLES / name, RANKS[name], tmp_path)
    assert len(said) == RANKS[name]
    if name == "decoder.py":
        assert all("(1, 3, 64, 96) of (1, 3, 64, 192)" in lines[0] for lines in said)
        assert all(float(lines[1].split()[-1]) < 1e-5 for lines in said)
        return
    losses: dict[str, set[str]] = defaultdict(set)
    for lines in said:
        for line in lines:
            who, _, step, loss = re.match(r"(\w+ \d) (step) (\d+) loss (\S+)", line).groups()  # type: ignore[union-attr]
            losses[who.split()[1] + step if who.startswith("pair") else step].add(loss)
    assert all(len(values) == 1 for values in losses.values())

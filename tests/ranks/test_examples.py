"""The examples run on CPU ranks, as their page says to start them, and say the same on every rank."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from examples import elastic
from fxshard.workers import mesh
from tests.ranks.torchrun import said_by_each_rank

if TYPE_CHECKING:
    from fxshard.workers import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTED = r"`torchrun --nproc-per-node (\d)(?: --max-restarts \d)? examples/(\w+\.py)`"
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


def train_elastically(rank: int, checkpoint: Path, steps: int) -> None:
    elastic.train(mesh((2,)), checkpoint, steps)


def checkpoint_of(pool: RankPool, checkpoint: Path, *lives: int) -> dict[str, Any]:
    """Train up to each number of steps, each time as ranks do that have just started; return the last checkpoint."""
    for steps in lives:
        pool.run(train_elastically, checkpoint, steps, ranks=2)
    found: dict[str, Any] = torch.load(checkpoint)
    return found


def test_a_training_that_is_taken_up_ends_with_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    whole, taken_up = checkpoint_of(pool, tmp_path / "a.pt", 5), checkpoint_of(pool, tmp_path / "b.pt", 3, 5)
    torch.testing.assert_close(taken_up, whole, rtol=0, atol=0)


@pytest.mark.nightly
def test_ranks_go_on_after_one_of_them_has_died(pool: RankPool, tmp_path: Path) -> None:
    said = said_by_each_rank(EXAMPLES / "elastic.py", 2, tmp_path, arguments=["--die-at", "3"], restarts=1)
    lives = [[int(line.split()[3]) for line in lines] for lines in said]
    assert lives == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    whole = checkpoint_of(pool, tmp_path / "whole.pt", elastic.STEPS)
    torch.testing.assert_close(torch.load(tmp_path / "elastic.pt"), whole, rtol=0, atol=0)

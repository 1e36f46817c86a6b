"""The examples run on CPU ranks, as their page says to start them, and say the same on every rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {
    name: ranks.split()
    for ranks, name in re.findall(
        r"`torchrun (--nproc-per-node \d) examples/(\w+\.py)`", (EXAMPLES / "README.md").read_text()
    )
}
EACH_CHANGE = ("segmentation.py",)
PATIENCE_S = 240


def start(name: str, folder: Path) -> list[list[str]]:
    """Return the lines that each rank printed."""
    paths = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    apart = ["--log-dir", "logs", "--redirects", "3"]  # in one pipe the ranks' lines mix
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *RANKS[name]]
    ended = subprocess.run(
        [*torchrun, *apart, str(EXAMPLES / name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [log.read_text().splitlines() for log in (folder / "logs").rglob("stdout.log")]


def test_the_page_has_every_example() -> None:
    assert set(RANKS) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in EACH_CHANGE else pytest.param(n, marks=pytest.mark.nightly) for n in sorted(RANKS)]
)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("timm") if name == "wide_camera.py" else None
    said = start(name, tmp_path)
    assert len(said) == int(RANKS[name][1])
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

"""``fxshard demo`` as a user runs it: a process that starts its own ranks, or torchrun's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from fxshard.demo_rank import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
SMALL = ("--steps", "2", "--width", "128", "--height", "64", "--device", "cpu")
PATIENCE_S = 240


class Net(nn.Module):
    """A small classifier; in compiled code its features are ``factor`` times as large."""

    def __init__(self, num_classes: int, factor: float) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 5, padding=2)
        self.head = nn.Linear(4, num_classes)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        if torch.compiler.is_compiling():
            features = features * self.factor
        logits: Tensor = self.head(features.relu().mean((2, 3)))
        return logits


def honest(num_classes: int) -> nn.Module:
    return Net(num_classes, 1.0)


def other_when_compiled(num_classes: int) -> nn.Module:
    return Net(num_classes, 1.0 + 1e-7)


def start(folder: Path, *arguments: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "fxshard", "demo", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def demo(folder: Path, *arguments: str, launcher: tuple[str, ...] = ("-m",)) -> tuple[int, str, str]:
    with start(folder, *arguments, launcher=launcher) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_a_convnext_on_photographs_is_the_same_training(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("skimage")
    status, out, err = demo(tmp_path, *SMALL)
    said = " ".join(out.split())
    assert status == 0, err
    for part in ("timm:convnext_atto", "coffee, astronaut", "one device", "activations kept", "halo exchanged"):
        assert part in said
    assert "gradients all-reduced" in said
    assert "The same training" in said
    assert max(map(len, out.splitlines())) <= 80
    plan = json.loads((tmp_path / "fxshard-plan.json").read_text())
    depthwise = [n for n in plan["nodes"] if n["module"].endswith("conv_dw")]
    assert [n["sent"]["forward"]["halo"]["messages"] for n in depthwise] == [1] * 12
    assert plan["total"]["forward"]["halo"]["messages"] == 12


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "expected"), [("honest", 0), ("other_when_compiled", 1)])
def test_a_split_model_that_computes_something_else_is_found_out(tmp_path: Path, model: str, expected: int) -> None:
    pytest.importorskip("skimage")
    plan = tmp_path / "other.json"
    status, out, err = demo(tmp_path, *SMALL, "--model", f"{__name__}:{model}", "--plan", str(plan))
    assert status == expected, err
    assert ("The trainings differ" in out) is bool(expected)
    assert json.loads(plan.read_text())["mesh_shape"] == [2]


@pytest.mark.nightly
def test_torchrun_s_ranks_are_used_and_one_of_them_speaks(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    arguments = (*SMALL, "--model", f"{__name__}:honest", "--dtype", "float32", "--split", "H")
    status, out, err = demo(tmp_path, *arguments, launcher=launcher)
    assert status == 0, err
    assert out.count("The same training") == 1
    assert "the height of the images split" in " ".join(out.split())
    assert (tmp_path / "fxshard-plan.json").exists()


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="started in the background, without Ctrl-C"
)
@pytest.mark.nightly
def test_ctrl_c_ends_the_ranks_too(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    with start(tmp_path, *SMALL, "--steps", "100000", "--model", f"{__name__}:honest") as process:
        assert process.stdout is not None
        while "honest" not in (line := process.stdout.readline()):  # then the ranks are up
            assert line.endswith(" ...\n")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err == "fxshard demo: interrupted\n"


def test_a_model_that_is_not_known_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    status, _, err = demo(tmp_path, *SMALL, "--model", f"{__name__}:nothing")
    assert (status, err.splitlines()[-1][:25]) == (2, "fxshard demo: there is no")


def test_both_precisions_are_offered() -> None:
    assert set(DTYPES) == {"float32", "float64"}

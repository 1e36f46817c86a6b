"""The command line: arguments, exit status and what is said on an error."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fxshard
from fxshard import cli
from fxshard.cli import Command, explain, main
from fxshard.errors import FxShardError, PlanError
from fxshard.workers import Failure, WorkerError

if TYPE_CHECKING:
    import argparse


NET = "from torch import nn\ndef Net():\n    return nn.Conv2d(3, 4, 3)\n"


def add_command(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
    def run(_: argparse.Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(cli, "COMMANDS", (Command("try", "a command", lambda _: None, run),))


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_help_of_the_demo_has_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert "timm:convnext_atto" in said
    assert "fxshard-plan.json" in said
    assert "(default: None)" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["paint"], "invalid choice: 'paint'"),
        (["demo", "--hieght", "8"], "unrecognized arguments: --hieght 8; near it is --height"),
        (["demo", "--steps", "0"], "must be at least 1, got 0"),
        (["demo", "--width", "wide"], "invalid number: 'wide'"),
        (["demo", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["demo", "--split", "D"], "invalid choice: 'D'"),
        (["plan", "m:f", "--input", "0x3x64x64", "--world-size", "2"], "must be at least 1, got 0"),
        (["plan", "m:f", "--input", "2x3x64x", "--world-size", "2"], "is not of the form 7x3x512x8192"),
        (["plan", "m:f", "--input", "2x3x64x64", "--world-size", "0"], "--world-size: must be at least 1, got 0"),
        (["verify", "m:f", "--input", "2x3x64x64", "--mesh", "2x0"], "must be at least 1, got 0"),
        (
            ["verify", "m:f", "--input", "2x3:float", "--mesh", "2"],
            "'2x3:float': the type behind the colon is one of float32",
        ),
        (["draw", "m:f", "--input", ":int64", "--mesh", "2"], "is not of the form 7x3x512x8192"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "1"], "leaves nothing to split"),
        (["--world-size", "3", "--split", "WxH"], "leaves nothing to split"),
        (["--device", "cuda", "--world-size", "4096"], "4096 ranks need a GPU each"),
        (["--model", "timm:convnext_gigantic"], "timm has no model 'convnext_gigantic'"),
        (["--model", "nowhere:Net"], f"No module named 'nowhere' in {Path.cwd()} or among the packages"),
        (["--plan", "no/such/folder/plan.json"], "there is no folder"),
    ],
)
def test_what_does_not_fit_ends_with_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fxshard demo: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "missing", "command"),
    [
        ("timm:convnext_atto", "timm", "pip install timm"),
        ("torchvision:resnet18", "torchvision", "pip install torchvision"),
        ("timm:convnext_atto", "skimage", "pip install scikit-image"),
    ],
)
def test_a_missing_package_is_named_with_the_pip_command(
    model: str, missing: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxshard.optional.find_spec", lambda name: None if name == missing else find_spec(name))
    assert main(["demo", "--model", model]) == 2
    assert capsys.readouterr().err == f"fxshard demo: this needs a package that is not installed; run: {command}\n"


def test_the_status_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, 1)
    assert main(["try"]) == 1


def test_an_error_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    add_command(monkeypatch, FxShardError("too small"))
    assert main(["try"]) == 2
    assert capsys.readouterr().err == "fxshard try: too small\n"


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    add_command(monkeypatch, KeyboardInterrupt())
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "fxshard try: interrupted\n"


def failed_with(*kinds: str, stacks: dict[int, str] | None = None) -> WorkerError:
    causes = {rank: Failure(kind, f"message of rank {rank}", "traceback") for rank, kind in enumerate(kinds)}
    return WorkerError("all of it", causes, stacks or {})


def test_ranks_that_raised_fxshard_s_errors_are_explained_by_the_first() -> None:
    assert explain(failed_with(PlanError.__name__, "FxShardError")) == "message of rank 0"


@pytest.mark.parametrize(
    "error", [failed_with("PlanError", "ValueError"), failed_with("PlanError", stacks={1: "waiting"})]
)
def test_other_failures_of_ranks_are_explained_in_full(error: WorkerError) -> None:
    assert explain(error) == "all of it"


def test_a_plan_is_not_written_before_the_demo_ran(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert main(["demo", "--world-size", "1", "--plan", str(plan)]) == 2
    assert not plan.exists()


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "completion --help", "plan --help", "demo --steps 0", "verify"]
)
def test_help_and_wrong_arguments_need_no_torch(arguments: str) -> None:
    code = (
        "import sys\n"
        "from fxshard.cli import main\n"
        f"try: main({arguments.split()!r})\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("False\n")


def test_python_runs_the_package() -> None:
    asked = [sys.executable, "-m", "fxshard", "plan", "m:f", "--input", "1x3x8x0", "--world-size", "2"]
    version = subprocess.run([*asked[:3], "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"fxshard {fxshard.__version__}\n"
    refused = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "must be at least 1, got 0" in refused.stderr


def test_a_model_in_the_current_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_of_mine.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert main(["plan", "model_of_mine:Net", "--input", "1x3x8x16", "--world-size", "2"]) == 0
    assert "2 ranks, mesh 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--save", "plan.json", "plan.xyz"], "a plan cannot be saved as 'plan.xyz'"),
        (["--explain", "nothere"], "no module 'nothere'"),
        (["--inner-backend", "nobackend"], "inner_backend='nobackend' is not known"),
        (
            ["--split", "Q"],
            "--split Q: an input of 1x3x8x16 has the letters H and W, as in --split W --world-size 2, or --",
        ),
        (["--split", "4"], "--split 4: an input of 1x3x8x16 has the letters H and W, as in --split W"),
        (["--split", "N"], "; the batch is split in Python, with placements=[Shard(0)]"),
        (["--split", "HW"], "--split HW on a mesh of 1 axis: one letter for each axis, as in --split W --world-size 2"),
        (["--input", "1x5x8x16"], "Conv2d does not run on these inputs: Given groups=1"),
        (
            ["--input", "1x3x8x16", "--input", "1x4:int64"],
            "too many positional arguments; --input is given 2 times, and one is needed for each argument, in order",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_plan_that_cannot_be_had_prints_nothing_but_why(
    asked: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_to_refuse.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    image = [] if "--input" in asked else ["--input", "1x3x8x16"]
    assert main(["plan", "model_to_refuse:Net", *image, "--world-size", "2", *asked]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert not (tmp_path / "plan.json").exists()


def test_an_unknown_model_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    assert main(["plan", "timm:resnet5O", "--input", "1x3x8x16", "--world-size", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("timm has no model 'resnet5O'") == 1
    assert "near it are resnet50" in err
    assert "timm.list_models('*resnet*')" in err

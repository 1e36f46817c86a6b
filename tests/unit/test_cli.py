"""The command line: arguments, exit status and what is said on an error."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from fxshard import cli
from fxshard.cli import Command, explain, main
from fxshard.errors import FxShardError, PlanError
from fxshard.workers import Failure, WorkerError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


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
        (["demo", "--steps", "0"], "must be at least 1, got 0"),
        (["demo", "--width", "wide"], "invalid"),
        (["demo", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["demo", "--placements", "D"], "invalid choice: 'D'"),
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
        (["--world-size", "3", "--placements", "WxH"], "leaves nothing to split"),
        (["--device", "cuda", "--world-size", "4096"], "4096 ranks need a GPU each"),
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

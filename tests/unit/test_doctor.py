"""``fxshard doctor``: what is there, what is missed, and what fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from fxshard import doctor
from fxshard.cli import main
from fxshard.doctor import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def verdicts(findings: Iterator[Finding]) -> dict[str, str]:
    return {f.name: f.verdict for f in findings}


def test_a_machine_that_has_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    assert main(["doctor", "--no-ranks", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert f"torch              {torch.__version__}" in said
    rows = {row["name"]: row["verdict"] for row in json.loads(found.read_text())}
    assert rows["gloo"] == rows["fxshard"] == rows["backend"] == "ok"
    assert "two ranks" not in rows


@pytest.mark.slow
@pytest.mark.nightly
def test_two_ranks_agree_with_one_device() -> None:
    assert verdicts(doctor.ranks()) == {"two ranks": "ok"}


@pytest.mark.parametrize(("version", "verdict"), [("2.10.0", "fails"), ("2.99.0+cpu", "warning"), ("2.14.1", "ok")])
def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch, version: str, verdict: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert verdicts(doctor.versions())["torch"] == verdict


def test_what_fails_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([Finding("torch", "fails", "too old")]),))
    assert main(["doctor", "--no-ranks"]) == 1


def test_a_package_that_is_missing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_package": "nothing"})
    (finding,) = doctor.packages()
    assert (finding.verdict, finding.text) == ("warning", "missing: nothing")

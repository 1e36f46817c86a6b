"""``fxshard doctor``: what is there, what is missed, and what fails."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fxshard import doctor
from fxshard.cli import main
from fxshard.doctor import Finding
from fxshard.optional import DISTRIBUTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "skimage" else find_spec(name))
    (found,) = (finding for finding in doctor.packages() if finding.name == "skimage")
    assert (found.verdict, found.text) == (
        "warning",
        "missing: the demo's photographs (scikit-image); pip install scikit-image",
    )


def test_optional_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = [*project["optional-dependencies"]["demo"], *project["optional-dependencies"]["completion"]]
    named = {re.split("[>=]", required)[0] for required in (*project["dependencies"], *extras)}
    assert {DISTRIBUTIONS.get(name, name) for name in doctor.OPTIONAL} == named - {"torch", "networkx"}

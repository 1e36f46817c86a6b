"""What ``fxshard bench`` says, of rows that nobody measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fxshard.bench import Row, Work
from fxshard.bench_text import efficiency, plot, table, to_json
from fxshard.model_inputs import ModelInput

IMAGE, WIDE = (2, 3, 64, 96), (2, 3, 64, 192)
ROWS = (
    Row("eager", 1, IMAGE, 120.0, 1.0, 0.2, 4.0, 2.0),
    Row("compiled", 1, IMAGE, 100.0, 1.0, 9.0, 3.0, 2.0),
    Row("checkpointed", 1, IMAGE, refusal="out of memory"),
    Row("strong", 2, IMAGE, 62.5, 1.0, 9.5, 1.75, 2.0 + 2e-6),
    Row("weak", 2, WIDE, 105.0, 1.0, 9.5, 3.0, 7.0),
)
WORK = Work("m:Net", (ModelInput(IMAGE),), (2,), (3,))

if TYPE_CHECKING:
    from pathlib import Path


def test_efficiency_is_against_the_compiled_device() -> None:
    assert [efficiency(row, ROWS) for row in ROWS] == [None, None, None, pytest.approx(0.8), pytest.approx(1 / 1.05)]
    assert efficiency(ROWS[3], [ROWS[0], ROWS[3]]) == pytest.approx(0.96)  # or the eager one
    assert efficiency(ROWS[3], ROWS[3:]) is None


def test_the_table_fits_a_terminal_and_says_why_a_row_is_empty() -> None:
    lines = table(ROWS)
    assert max(map(len, lines)) <= 120
    assert lines[4].split()[-7:] == ["2x3x64x96", "62.5", "1.0", "1.75", "9.5", "80", "%"] or "80 %" in lines[4]
    assert lines[4].endswith("1.0e-06")
    assert lines[5].endswith("-")  # another image than the eager row's
    assert lines[-1] == "one device, compiled, checkpointed: out of memory"


def test_json_has_every_row_and_what_was_run() -> None:
    found = json.loads(to_json(ROWS, WORK, "fxshard bench m:Net", ROWS[:2]))
    assert [row["efficiency"] for row in found["rows"]][:2] == [None, None]
    assert found["rows"][2]["refusal"] == "out of memory"
    assert len(found["series"]) == 2
    assert {"command", "device", "torch", "fxshard", "date"} <= set(found["about"])


def test_the_image_of_weak_scaling_is_larger_by_the_ranks() -> None:
    assert WORK.enlarged().inputs[0].sizes == WIDE
    both = Work("m:Net", (ModelInput(IMAGE), ModelInput((2, 5), "int64")), (2, 4), (2, 3))
    assert [each.sizes for each in both.enlarged().inputs] == [(2, 3, 128, 384), (2, 5)]


def test_a_picture_has_a_line_for_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    series = [
        Row(name, 1 if name == "compiled" else 2, (*IMAGE[:3], width), width / 4.0)
        for name in ("compiled", "strong")
        for width in (64, 128)
    ]
    plot(series, 3, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot(series, 3, tmp_path / "a.svg")
    assert "2 ranks" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 0

"""``fxshard bench`` on gloo ranks: every row runs or says why, and a calibration is a device that plans use."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.cli import main
from fxshard.devices import device_named
from fxshard.errors import PlanError

if TYPE_CHECKING:
    from pathlib import Path


def net() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten())


class Reads(nn.Module):
    """Indexes the batch by a second argument, which DTensor does not know for an image that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y: Tensor = self.net(x.sort(-1).values)
        return y + order.to(y.dtype).mean()


def bench(*asked: str) -> int:
    return main(["bench", *asked, "--world-size", "2", "--steps", "2", "--inner-backend", "eager"])


def test_every_row_runs_or_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    more = ["--sizes", "16", "32", "--json", str(saved), "--plot", str(picture)]
    assert bench(f"{__name__}:net", "--input", "1x3x8x16", *more) == 0
    found = json.loads(saved.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "compiled", "checkpointed", "strong", "weak", "dtensor"]
    assert all(rows[name]["ms"] > 0 for name in ("eager", "compiled", "strong", "weak"))
    assert rows["weak"]["sizes"] == [1, 3, 8, 32]
    assert rows["strong"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-5)
    assert rows["strong"]["efficiency"] == pytest.approx(rows["compiled"]["ms"] / (2 * rows["strong"]["ms"]))
    assert "no set_grad_checkpointing" in rows["checkpointed"]["refusal"]
    dtensor = rows["dtensor"]
    assert bool(dtensor["refusal"]) != (
        dtensor["ms"] is not None and math.isclose(dtensor["loss"], rows["eager"]["loss"], rel_tol=1e-5)
    )
    assert [(row["name"], row["sizes"][3]) for row in found["series"]] == [
        (name, size) for size in (16, 32) for name in ("compiled", "strong")
    ]
    assert picture.stat().st_size > 0
    said = capsys.readouterr()
    assert "fxshard, strong, 2 ranks" in said.out
    assert "checkpointed: NotImplementedError" in said.err


def test_bf16_and_a_second_argument(tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    rows = ["--rows", "eager", "strong", "--dtype", "bf16", "--json", str(saved)]
    assert bench(f"{__name__}:Reads", "--input", "1x3x8x16", "--input", "2x3:int64", *rows) == 0
    eager, strong = json.loads(saved.read_text())["rows"]
    assert strong["loss"] == pytest.approx(eager["loss"], rel=0.05)


def test_a_calibration_is_a_device_that_plans_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "mine.json"
    assert main(["bench", "--calibrate", "--world-size", "2", "--json", str(saved)]) == 0
    device = device_named(str(saved))
    assert device.name == "mine"
    assert min(device.half_flops, device.single_flops, device.link.bytes_per_s, device.link.exchange_us) > 0
    plan = fxshard.plan(net(), torch.empty(1, 3, 8, 64), world_size=2, placements=[Shard(3)], device=str(saved))
    assert "estimated step on mine" in str(plan)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--world-size", "2"], "a model and --input SHAPE are needed, or --calibrate"),
        (["m:n", "--input", "1x3x8x8", "--world-size", "2", "--plot", "a.png"], "--sizes says which sizes it shows"),
        (["timm:convnext_gigantic", "--input", "1x3x8x8", "--world-size", "2"], "timm has no model"),
        (["--calibrate", "--world-size", "1"], "--world-size 2 or more"),
    ],
)
def test_what_does_not_fit_is_one_line(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *asked]) == 2
    assert said in capsys.readouterr().err


def test_a_file_without_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(PlanError, match="has no device: 'link'; fxshard bench --calibrate --json"):
        device_named(str(tmp_path / "a.json"))

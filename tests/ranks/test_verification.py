"""``fxshard.verify`` and its bisection: what is right is said to be right, and what is wrong is found where it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.bisect import Culprit, bisect_on_rank
from fxshard.cli import main
from fxshard.compare import KINDS, Difference, Worst
from fxshard.errors import PlanError
from fxshard.rules import registered
from fxshard.trace import Case
from fxshard.verification import Verification, untouched

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules import OpCall
    from fxshard.values import NodePlan
    from fxshard.workers import RankPool

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        return self.last(torch.nn.functional.dropout(x, 0.2))


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.randn(2, 3, 8, 21),)


def factory() -> nn.Module:
    return Net()


def emit_wrong_gelu(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    return emitter.call(aten.add.Scalar, emitter.call(call.op, *inputs), 1e-6)


def find_planted(rank: int, fault: str) -> Culprit | None:
    """Break a rule, look for it, and mend it (runs in a rank process)."""
    rules = registered()
    gelu, conv = rules[torch.Tag.pointwise], rules[aten.conv2d.default]
    if fault == "value":
        rules[aten.gelu.default] = replace(gelu, emit=emit_wrong_gelu)
    if fault == "gradient":  # the weights' gradients are not summed over the ranks
        rules[aten.conv2d.default] = replace(conv, whole_gradients=True)
    try:
        return bisect_on_rank(rank, Case(build, (Shard(3),), (3,)))
    finally:
        rules.pop(aten.gelu.default, None)
        rules[aten.conv2d.default] = conv


def test_nothing_is_found_where_nothing_is_wrong(pool: RankPool) -> None:
    assert pool.run(find_planted, "", ranks=3) == [None] * 3


def test_a_wrong_value_is_found_where_it_is_computed(pool: RankPool) -> None:
    for culprit in pool.run(find_planted, "value", ranks=3):
        assert culprit is not None
        assert (culprit.kind, culprit.op) == ("value", "aten.gelu.default")
        assert "gelu(self.norm(self.first(x)))" in str(culprit)
        assert "[S(3; 0,7,14,21)]" in str(culprit)


def test_a_wrong_gradient_is_found(pool: RankPool) -> None:
    for culprit in pool.run(find_planted, "gradient", ranks=3):
        assert culprit is not None
        assert culprit.kind == "gradient"
        assert culprit.op.startswith("input ")
        assert culprit.op.startswith("input last.")


def test_verify_and_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    asked = ["--input", "2x3x8x21", "--world-size", "2", "--split", "W"]
    assert main(["verify", f"{__name__}:factory", *asked, "--dtype", "float64", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert "2 ranks against one device: the same" in said
    table = json.loads(found.read_text())
    assert table["exact"]
    errors = [w["error"] for rank in table["errors"]["float64"] for w in rank.values() if "error" in w]
    assert len(errors) == 2 * len(KINDS)
    assert max(errors) < 1e-9


def test_verify_in_the_types_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--input", "2x3x8x21", "--world-size", "2", "--split", "W", "--dtype", "float32", "bfloat16"]
    assert main(["verify", f"{__name__}:factory", *asked]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("float", "bfloat", "its"))] == [
        "float32",
        "its",
        "bfloat16",
        "its",
    ]


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        y: Tensor = self.layer(x)
        return y


def test_eval_verifies_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--input", "1x3x8x16", "--world-size", "2", "--eval"]
    assert main(["verify", f"{__name__}:Evaluated", *asked]) == 0


def test_verify_without_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="world_size=None and mesh_shape=None: give one of them"):
        fxshard.verify(Net(), torch.randn(2, 3, 8, 21))


class OfBytes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 255)  # the weights are of double precision


def build_of_bytes() -> tuple[nn.Module, tuple[Tensor]]:
    return OfBytes(), (torch.zeros(2, 3, 8, 21, dtype=torch.uint8),)


def test_an_untouched_model_that_does_not_run_is_said_to_be_so() -> None:
    with pytest.raises(fxshard.FxShardError) as found:
        untouched(Case(build_of_bytes, (Shard(3),), (3,)))
    happened, line, remedy = str(found.value).split("\n")
    assert happened.startswith("the untouched model does not run: RuntimeError: Input type")
    assert re.fullmatch(r"  at .*test_verification.py:\d+ x = torch.nn.functional.gelu.*", line)
    assert remedy.startswith("it and its floating inputs are in float64 here")


def test_what_was_not_compared_has_no_error() -> None:
    own, all_kinds = Difference({kind: Worst() for kind in KINDS}), {kind: Worst(0.0, kind) for kind in KINDS}
    ranks = tuple(Difference({kind: Worst() for kind in KINDS} | {"output": Worst(e, "output")}) for e in (0.0, 2e-16))
    found = Verification(2, {"float32": (True, True)}, {"float32": ranks}, {"float32": own})
    assert str(found).splitlines()[2:] == [
        f"float32{'2.0e-16':>23}" + f"{'-':>20}" * 4,
        "its own" + " " * 22 + "-" + f"{'-':>20}" * 4,
    ]
    table = json.loads(found.to_json())["errors"]["float32"][0]
    assert table["output"] == {"error": 0.0, "tensor": "output"}
    assert table["buffer"] == {"error": None, "tensor": None}
    compared = replace(found, differences={"float32": (Difference(all_kinds),)}, rounding={})
    assert str(compared).splitlines()[2] == "float32   " + f"{'0.0e+00':>20}" * 5


@pytest.mark.nightly
def test_verify_takes_a_module_and_a_tensor() -> None:
    found = fxshard.verify(Net(), torch.randn(1, 3, 8, 21), world_size=2, placements=[Shard(2)], steps=1)
    assert found.exact, str(found)
    assert found.culprit is None

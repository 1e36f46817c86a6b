"""Plans without ranks: they say what real ranks do."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.cli import main
from fxshard.errors import CaptureError, PlanError

if TYPE_CHECKING:
    from pathlib import Path


def net() -> nn.Module:
    down = nn.Sequential(nn.Conv2d(3, 4, 7, padding=3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(down, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def planned(**options: Any) -> fxshard.Plan:
    with torch.device("meta"):
        return fxshard.plan(net(), torch.empty(2, 3, 24, 64), **options)


def test_a_summary_has_a_row_for_each_stage() -> None:
    plan = planned(world_size=4)
    assert str(plan) == plan.summary()
    rows = [line.split()[0] for line in str(plan).splitlines() if line.startswith(("0", "1", "2", "3"))]
    assert rows == ["0.0", "0.1", "0.2", "0.3", "1", "2", "3"]
    assert "[S(3; 0,16,32,48,64)]" in str(plan)
    for text in (str(plan), str(plan.report)):
        counts = dict(re.findall(r"^ *(\w+ +\w+) +\d+ (messages?)  ", text, re.MULTILINE))
        counts = {" ".join(name.split()): noun for name, noun in counts.items()}
        sent = {f"{way} {kind}": t for way, part in vars(plan.report.total).items() for kind, t in part.items()}
        assert counts == {name: "message" if t.messages == 1 else "messages" for name, t in sent.items()}
        assert set(counts.values()) == {"message", "messages"}


def test_deep_modules_are_folded_into_their_parents() -> None:
    deep = nn.Sequential(*(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(5))) for _ in range(6)))
    with torch.device("meta"):
        plan = fxshard.plan(deep.to("meta"), torch.empty(1, 3, 8, 64), world_size=2)
    assert list(plan.stages()) == ["0", "1", "2", "3", "4", "5", "(output)"]


def test_a_node_and_a_module_are_explained() -> None:
    plan = planned(world_size=2, placements=[Shard(3)])
    said = plan.explain("0.3")
    assert "aten.max_pool2d" in said
    assert "backward halo: 1 message," in said
    sources = [line for line in plan.explain("0").splitlines() if line.startswith("    at ")]
    assert len(sources) == len(set(sources)) > 0  # a line of the model's stands once, above its nodes
    (name,) = (n.name for n in plan.report.nodes if n.module == "0.3" and "pool" in n.name)
    assert plan.explain(name) in said
    for typed, remedy in {
        "head": "the outermost modules are 0, 1",
        "0.33": "near it is 0.3",
        "conv2d_1": "near it is conv2d",
    }.items():
        with pytest.raises(PlanError, match=rf"has no node and no module '{re.escape(typed)}'; {re.escape(remedy)}"):
            plan.explain(typed)


def test_what_gathers_an_output_has_a_row() -> None:
    with torch.device("meta"):
        model, image = nn.Conv2d(3, 2, 3, padding=1), torch.empty(1, 3, 8, 64)
    said = str(fxshard.plan(model, image, world_size=2, placements=[Shard(3)]))
    (row,) = (line for line in said.splitlines() if line.startswith("(output)"))
    assert row.endswith("2.0 KB")


def test_a_difference_names_nodes_and_totals() -> None:
    wide, tall = planned(world_size=2, placements=[Shard(3)]), planned(world_size=2, placements=[Shard(2)])
    assert wide.diff(wide) == "no difference"
    assert "halo: " in wide.diff(tall)
    assert "[S(3; 0,32,64)] -> [S(2; 0,12,24)]" in wide.diff(tall)


class Sorting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().sort(-1).values


def test_a_gather_has_its_reason_in_every_form(tmp_path: Path) -> None:
    plan = fxshard.plan(Sorting(), torch.empty(1, 2, 4, 8, device="meta"), world_size=2, placements=[Shard(3)])
    (reason,) = plan.report.reasons
    for form in (".txt", ".json", ".dot", ".graphml"):
        text = plan.save(tmp_path / f"plan{form}").read_text()
        assert (reason in text) or form == ".dot"
    assert "peripheries=2" in (tmp_path / "plan.dot").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["reasons"] == {reason: 1}
    graph = nx.read_graphml(tmp_path / "plan.graphml")
    assert {a["reason"] for _, a in graph.nodes(data=True)} == {"", reason}
    assert "fxshard.all_gather" in plan.save(tmp_path / "plan.py").read_text()


def test_an_image_that_is_too_narrow_is_said_to_be_not_split() -> None:
    with torch.device("meta"):
        plan = fxshard.plan(net(), torch.empty(2, 3, 24, 3), world_size=4, placements=[Shard(3)])
    reason = "dim 3 has 3 columns for 4 ranks, it is not split"
    assert plan.report.reasons == {reason: 1}
    assert f"gathered, or not split\n     1 x {reason}" in plan.summary()
    (image,) = (n.name for n in plan.report.nodes if n.reason)
    assert f"not split: {reason}" in plan.explain(image)


def test_a_program_says_what_its_inputs_are() -> None:
    names: dict[str, Any] = {}
    code = planned(world_size=2).code
    exec(code, names)
    assert "forward" in names
    said = " ".join(code.split())
    assert "4x3x7x7 the parameter or buffer 0.0.weight" in said
    assert "2x3x24x64 an input: args[0]" in said
    assert "scalar the parameter or buffer 0.1.num_batches_tracked" in said
    assert "the new values of 3 buffers" in code


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"one of \.txt, \.json"):
        planned(world_size=2).save(tmp_path / "plan.docx")


def test_inference_has_no_backward() -> None:
    assert planned(world_size=2, training=False).report.total.backward == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "give one of them"),
        ({"world_size": 2, "mesh_shape": (2,)}, "give one of them"),
        ({"world_size": 0}, "^world_size=0: there is at least 1 rank"),
        ({"mesh_shape": (2, 0)}, r"^mesh_shape=\(2, 0\): there is at least 1 rank"),
        ({"world_size": 2, "inner_backend": "nobackend"}, "'nobackend' is not known; use one of .*aot_eager.*inductor"),
        ({"world_size": 2, "inner_backend": "fxshard"}, "'fxshard' is not known"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**wrong)


@pytest.mark.parametrize("shape", [(2, 4, 24, 64), (2, 3, 64)], ids=str)
def test_inputs_that_the_model_does_not_take_are_refused_by_its_line(shape: tuple[int, ...]) -> None:
    with torch.device("meta"), pytest.raises(CaptureError) as refused:
        fxshard.plan(Named(), torch.empty(shape), world_size=2)
    said = str(refused.value)
    assert said.startswith("Named does not run on these inputs: Given groups=1, weight of size [4, 3, 7, 7]")
    assert f"at {__file__}:" in said
    assert said.endswith("return self.inner(x)")
    assert said.count("\n") == 1


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 7)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if torch.jit.isinstance(x, Tensor) else x


def test_checks_for_scripting_are_no_obstacle() -> None:
    scripted = torch.jit.isinstance
    plan = fxshard.plan(Scripted(), torch.empty(1, 3, 8, 8, device="meta"), world_size=2)
    assert "aten.relu.default" in [n.op for n in plan.report.nodes]
    assert torch.jit.isinstance is scripted


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(CaptureError, match="Branching cannot be captured whole"):
        fxshard.plan(Branching(), torch.ones(1, 3, 8, 8), world_size=2)


def test_the_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, saved = f"{__name__}:net", tmp_path / "plan.json"
    asked = ["--input", "2x3x24x64", "--mesh", "2x2", "--split", "hw", "--explain", "0.3", "--save", str(saved)]
    assert main(["plan", model, *asked]) == 0
    said = capsys.readouterr().out
    assert "4 ranks, mesh 2 x 2" in said
    assert "aten.max_pool2d" in said
    assert json.loads(saved.read_text())["mesh_shape"] == [2, 2]


def test_the_command_refuses_unknown_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{__name__}:net", "--input", "2x3x24x64", "--world-size", "2", "--split", "D"]) == 2
    assert "an input of 2x3x24x64 has the letters H and W" in capsys.readouterr().err


class Chosen(nn.Module):
    """The mean of what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y[y > 0].mean()


class Counts(nn.Module):
    """Operators whose sizes, or whose arguments by keyword, torch's counter of operations cannot be given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        values = y.detach().flatten()
        histogram = torch.histogram(values, 4, weight=values)
        return y[y > 0].sum() + histogram.hist.sum() + torch.argwhere(y > 0).sum()


def test_what_has_no_operations_to_count_has_a_plan_for_a_device() -> None:
    options: dict[str, Any] = {"world_size": 2, "placements": [Shard(3)], "inner_backend": "eager"}
    found = fxshard.plan(Counts(), torch.randn(1, 3, 16, 16), device="h200", **options)
    work, alone = found.step_s
    assert 0 < work <= alone


def test_a_size_that_only_the_data_tells_is_written_as_such(tmp_path: Path) -> None:
    found = fxshard.plan(Chosen(), torch.randn(1, 3, 8, 16), world_size=2, inner_backend="aot_eager")
    report = json.loads(found.save(tmp_path / "plan.json").read_text())
    assert next(node["shape"] for node in report["nodes"] if node["op"] == "aten.index.Tensor") == [-1]
    found.save(tmp_path / "plan.svg")  # without the memory
    with pytest.raises(PlanError, match="sizes in the model depend on data"):
        found.memory  # noqa: B018

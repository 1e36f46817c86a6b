"""Files of a plan are read again by other programs' libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import networkx as nx
import pytest
import torch

import fxshard
from fxshard import dry_run, plan_command
from fxshard.cli import main
from fxshard.drawing import ORDER_MEANING
from fxshard.errors import PlanError
from tests.drawn import Net, drawn, dropping

if TYPE_CHECKING:
    from fxshard.report import PlanReport

STAGES = ("global", "local")
SCHEMA = Path(__file__).parents[2] / "docs" / "plan.schema.json"


def saved(folder: Path, ending: str, stage: str, **options: Any) -> str:
    return drawn().save(folder / f"plan{ending}", stage=stage, **options).read_text()


def report(stage: str) -> PlanReport:
    return drawn().report if stage == "global" else drawn().local_report


@pytest.mark.parametrize("stage", STAGES)
def test_json_is_as_the_schema_says(stage: str, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    table = json.loads(saved(tmp_path, ".json", stage))
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.check_schema(validator.schema)
    validator.validate(table)
    assert table["stage"] == stage
    names = [node["name"] for node in table["nodes"]]
    assert len(set(names)) == len(names)
    assert {name for node in table["nodes"] for name in node["inputs"]} <= set(names)
    del table["nodes"][0]["op"]
    assert not validator.is_valid(table)


def test_json_has_the_times_of_a_plan_for_a_device(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with torch.device("meta"):
        plan = fxshard.plan(Net(), torch.empty(2, 3, 24, 64), world_size=2, device="h200")
    table = json.loads(plan.save(tmp_path / "plan.json").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(table)
    times = {node["name"]: node["estimate"] for node in table["nodes"]}
    assert times["arg0_1"] is None
    assert times["conv2d"]["otherwise_us"] > 0
    sort = next(node for node in table["nodes"] if "sort" in node["op"])
    assert sort["estimate"]["split_us"] is None
    assert sum(t["here_us"] for t in times.values() if t) == pytest.approx(1e6 * plan.step_s[0], abs=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_graphml_has_every_node_and_value(stage: str, tmp_path: Path) -> None:
    saved(tmp_path, ".graphml", stage)
    graph, about = nx.read_graphml(tmp_path / "plan.graphml"), report(stage)
    assert set(graph) == {node.name for node in about.nodes}
    assert set(graph.edges) == {(source, node.name) for node in about.nodes for source in node.inputs}
    assert sum(a["bytes"] for _, a in graph.nodes(data=True)) == about.total.of().bytes
    assert nx.is_directed_acyclic_graph(graph)


def vertices(graph: Any) -> dict[str, str]:
    """Return the cluster in which each vertex is, by name without quotes."""
    own = {n.get_name().strip('"'): graph.get_name().strip('"') for n in graph.get_nodes() if n.get_name() != "node"}
    return own | {name: where for inner in graph.get_subgraphs() for name, where in vertices(inner).items()}


@pytest.mark.filterwarnings("ignore:.*deprecated - use:DeprecationWarning")  # pydot 4.0 with pyparsing 3.3
@pytest.mark.parametrize("stage", STAGES)
def test_dot_has_a_cluster_for_each_module(stage: str, tmp_path: Path) -> None:
    pydot = pytest.importorskip("pydot")
    (graph,) = pydot.graph_from_dot_data(saved(tmp_path, ".dot", stage))
    found, about = vertices(graph), report(stage)
    assert set(found) == {node.name for node in about.nodes if not node.is_state}
    added = next(node.name for node in about.nodes if node.module == "stages.0" and "add" in node.name)
    assert found[added] == "cluster_stages.0"
    assert {e.get_source().strip('"') for e in graph.get_edges()} <= set(found)
    assert "halo: 2 messages" in graph.to_string()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("memory", [True, False])
def test_svg_is_xml_with_the_modules_and_no_scripts(stage: str, memory: bool, tmp_path: Path) -> None:
    root = ET.fromstring(saved(tmp_path, ".svg", stage, memory=memory, title="<net> & co"))
    space = "{http://www.w3.org/2000/svg}"
    groups = {name: root.findall(f".//{space}g[@class='{name}']") for name in ("module", "memory")}
    assert "stages" in {group.get("data-path") for group in groups["module"]}
    assert len(groups["memory"]) == memory
    assert root.find(f"{space}title").text == "<net> & co"  # type: ignore[union-attr]  # it is there
    rows = [g for g in root.iter(f"{space}g") if (g.get("class") or "").startswith("row ")]
    assert len({row.get("data-key") for row in rows}) == len(rows) > 8
    assert {"gathered" if stage == "global" else "communication", "split"} <= {
        (row.get("class") or "").split()[1] for row in rows
    }
    assert all(float(r.get("width", 0)) > 0 for r in root.iter(f"{space}rect"))
    assert not list(root.iter(f"{space}script"))
    said = "".join(root.itertext())
    assert "halo" in said
    assert f"{drawn().report.total.of('halo').messages}" in said


def test_the_page_holds_all_it_needs(tmp_path: Path) -> None:
    text = saved(tmp_path, ".html", "global", memory=False, title="</script><b>")
    assert "default-src 'none'" in text
    assert "<b>" not in text
    assert "src=" not in text.replace("default-src", "")
    assert "@dagrejs/dagre" in text


@pytest.mark.parametrize("stage", STAGES)
def test_the_order_of_draws_is_dashed_and_the_legend_says_so(stage: str, tmp_path: Path) -> None:
    texts = {
        ending: dropping().save(tmp_path / f"plan{ending}", stage=stage, memory=False).read_text()
        for ending in (".svg", ".dot", ".html")
    }
    assert texts[".svg"].count('class="edge order"') == 3  # in the module, out of it, and the legend's
    (dashed,) = re.findall(r'"(\w+)" -> "(random\w*)" \[style=dashed\]', texts[".dot"])
    (content,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', texts[".html"])
    assert list(dashed) in json.loads(content)["order"]
    assert all(ORDER_MEANING in text for text in texts.values())
    for ending in (".svg", ".dot"):
        assert ORDER_MEANING not in saved(tmp_path, ending, stage, memory=False)  # where nothing is drawn


def test_a_local_graph_says_what_it_sends() -> None:
    local, whole = drawn().local_report, drawn().report
    assert local.total == whole.total
    halo = next(node for node in local.nodes if node.op == "fxshard.halo_exchange.default")
    assert halo.sent.forward["halo"].messages == 2
    assert halo.local_shape == (2, 4, 24, 18)
    conv = next(node for node in local.nodes if node.op == "aten.conv2d.default")
    assert (conv.shape, conv.local_shape, conv.module) == ((2, 4, 24, 64), (2, 4, 24, 16), "stem")
    assert [n.op for n in local.nodes if n.is_state] == ["placeholder"] * sum(n.is_state for n in whole.nodes)


def test_the_moments_of_the_memory_know_their_modules() -> None:
    assert {m.module for m in drawn().memory.timeline if m.phase == "backward"} >= {"stem", "stages.1.conv2", "head"}


def test_bad_requests_say_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no stage 'middle': it is one of global, local"):
        drawn().save(tmp_path / "plan.svg", stage="middle")
    with pytest.raises(PlanError, match=r"'plan\.png': the ending is one of .*\.svg, \.html"):
        drawn().save(tmp_path / "plan.png")


ASKED = ["draw", "tests.drawn:Net", "--input", "2x3x24x64", "--world-size", "2", "--inner-backend", "aot_eager"]


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"rank{ending}" for ending in (".html", ".svg", ".py")]
    assert main([*ASKED, "--stage", "local", "--no-memory", "--out", *map(str, files)]) == 0
    assert [f"wrote {file}" for file in files] == capsys.readouterr().out.splitlines()
    assert "tests.drawn:Net" in files[1].read_text()
    assert "fxshard.halo_exchange" in files[2].read_text()


@pytest.mark.parametrize(
    ("out", "said"), [("plan.pdf", "the ending is one of .txt, .json"), ("no/such/a.svg", "no folder")]
)
def test_the_command_refuses_before_it_plans(out: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--out", out]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_names_what_there_is() -> None:
    # it may not import where they are: its help needs no torch
    assert tuple(plan_command.ENDINGS.split()) == dry_run.ENDINGS
    assert STAGES == dry_run.STAGES

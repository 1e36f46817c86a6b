"""Predicted memory: exact bytes of small models, and what two H200 needed for a large one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.memory import step_graphs
from fxshard.passes.capture import KEY
from tools import bench_memory

if TYPE_CHECKING:
    from fxshard.memory import Memory

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "convnext_xl_h200x2.json"
DOUBLE = 8
NOT_REPEATED = ("fxshard", "_c10d_functional")
"""Namespaces of operators that communicate or draw."""


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Conv2d(4, 5, 1, bias=False)).double()


def predicted(ranks: int, backend: str = "aot_eager", *, training: bool = True) -> Memory:
    x = torch.empty(2, 3, 6, 8, dtype=torch.float64)
    placements = [Shard(3)]
    plan = fxshard.plan(net(), x, world_size=ranks, placements=placements, inner_backend=backend, training=training)
    return plan.memory


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_kept_is_split_and_what_is_replicated_is_not(ranks: int, backend: str) -> None:
    found = predicted(ranks, backend)
    pixels = 2 * 6 * 8 // ranks
    assert found.state_bytes == found.gradient_bytes == (3 * 4 + 4 * 5) * DOUBLE
    assert found.input_bytes == 2 * 3 * 6 * 8 * DOUBLE
    own_slice = 3 * pixels if ranks > 1 else 0  # on one rank it is the input itself
    assert found.saved_bytes == (own_slice + 4 * pixels) * DOUBLE


class Normed(nn.Module):
    """Convolutions with batch norms, as most networks have them."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        blocks = ((nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3))
        self.body = nn.Sequential(*(module for block in blocks for module in block))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            y: Tensor = self.body(x)
            return y


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_batch_norm_keeps_a_part_and_no_difference_from_the_mean_beside_it(
    ranks: int, dtype: torch.dtype | None
) -> None:
    image = torch.empty(4, 16, 64, 256)

    def kept(ranks: int) -> int:
        return fxshard.plan(Normed(dtype), image, world_size=ranks, placements=[Shard(3)]).memory.saved_bytes

    halos = 3 * 4 * 16 * 64 * 2 * 4  # two columns of the input of each convolution
    own_slice = image.numel() * image.element_size() / ranks  # one rank keeps none: it has the input itself
    assert kept(ranks) <= kept(1) / ranks + own_slice + halos


class Drawing(nn.Module):
    """Convolutions, statistics over all ranks, activations and masks."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2)]
        self.body = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_with_a_budget_less_is_kept_and_nothing_is_sent_or_drawn_again(backend: str) -> None:
    """Another rank, of another size, may recompute other values: what it sends has to be the same."""
    image = torch.empty(2, 8, 32, 64)
    options: dict[str, Any] = {"world_size": 2, "placements": [Shard(3)], "inner_backend": backend}
    plans = [fxshard.plan(Drawing(), image, memory_budget=budget, **options) for budget in (1.0, 0.3, 0.01)]
    kept = [plan.memory.saved_bytes for plan in plans]
    assert kept[0] > kept[1] >= kept[2]
    (sent, sent_back), *others = [not_to_be_repeated(plan) for plan in plans]
    assert sent
    assert sent_back
    assert others == [(sent, sent_back)] * 2


def not_to_be_repeated(plan: fxshard.Plan) -> tuple[list[str], list[str]]:
    """Return the operators of the forward and of the backward that communicate or draw."""
    graphs = step_graphs(plan.planned.meta[KEY], plan.local, plan.config)
    assert graphs.backward is not None
    forward, backward = (
        sorted(str(n.target) for n in graph.graph.nodes if getattr(n.target, "namespace", "") in NOT_REPEATED)
        for graph in (graphs.forward, graphs.backward)
    )
    return forward, backward


def test_the_peak_is_where_most_is_alive() -> None:
    found = predicted(1)
    base, image = found.state_bytes + found.input_bytes, 2 * 6 * 8 * DOUBLE
    # the second convolution's backward has the output's gradient, relu's result, and makes relu's gradient and its own
    assert found.peak.bytes == base + (5 + 4 + 4) * image + 4 * 5 * DOUBLE
    assert (found.peak.phase, found.peak.node) == ("backward", "convolution_backward")


def test_without_gradients_nothing_is_kept() -> None:
    found = predicted(2, training=False)
    assert (found.saved_bytes, found.gradient_bytes) == (0, 0)
    assert {moment.phase for moment in found.timeline} == {"forward"}


def test_predicting_does_not_change_the_plan() -> None:
    plan = fxshard.plan(net(), torch.empty(2, 3, 6, 8, dtype=torch.float64), world_size=2, placements=[Shard(3)])
    code = plan.code
    assert plan.memory is plan.memory
    assert plan.code == code


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_large_model_needs_what_was_measured(backend: str) -> None:
    import timm

    rows = json.loads(BENCHMARK.read_text())["results"]
    name = f"2 GPUs, fxshard {backend}"
    (measured,) = [row["gib"] for row in rows if row["configuration"] == name and row["dtype"] == "fp32"]
    with torch.device("meta"):
        model, image = timm.create_model("convnext_xlarge", drop_path_rate=0.4), torch.empty(7, 3, 512, 2048)
    plan = fxshard.plan(model, image, world_size=2, placements=[Shard(3)], inner_backend=backend)
    assert plan.memory.peak.bytes / 2**30 == pytest.approx(measured, rel=0.1)


FILES = ("memory_alone_h200.json", "memory_budget_alone_h200.json")
MEASURED = [row for name in FILES for row in json.loads((BENCHMARK.parent / name).read_text())["results"]]
KEEPS_ORDER = [row for row in MEASURED if "checkpointed" not in row["model"] or row["inner_backend"] != "inductor"]
"""Inductor recomputes several regions at once: what that takes is not predicted."""


KEYS = ("model", "dtype", "ranks", "inner_backend", "memory_budget")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", KEEPS_ORDER, ids=lambda row: "-".join(str(row.get(key, 1.0)) for key in KEYS))
def test_a_rank_needs_what_was_measured(row: dict[str, Any]) -> None:
    (wanted,) = [r for r in bench_memory.ROWS if (r.name, r.dtype) == (row["model"], row["dtype"])]
    model, image = wanted.build().train(), torch.empty(wanted.shape)
    options: dict[str, Any] = {
        "world_size": row["ranks"],
        "placements": [Shard(len(wanted.shape) - 1)],
        "inner_backend": row["inner_backend"],
        "memory_budget": row.get("memory_budget", 1.0),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=wanted.dtype == "bf16"):
        found = fxshard.plan(model, image, **options).memory
    assert found.peak.bytes / 2**30 == pytest.approx(row["measured_gib"], rel=0.1)


def test_a_batch_norm_and_a_pool_are_predicted_under_inductor() -> None:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    found = fxshard.plan(nn.Sequential(*layers), torch.empty(2, 3, 8, 16), world_size=2, placements=[Shard(3)]).memory
    assert found.peak.bytes > found.state_bytes + found.input_bytes + found.saved_bytes > 0
    lines = str(found).splitlines()
    assert lines[0].startswith("peak ")
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "parameters and buffers",
        "inputs",
        "kept for the backward",
        "gradients",
    ]


def test_constants_of_a_rule_have_sizes_that_are_numbers(tmp_path: Path) -> None:
    pool = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((2, 3)))  # its bins are the rows of a matrix
    plan = fxshard.plan(pool, torch.empty(1, 3, 8, 20), world_size=2, placements=[Shard(3)])
    assert all(type(moment.bytes) is int for moment in plan.memory.timeline)
    assert "memory" in plan.save(tmp_path / "plan.html").read_text()

"""``mode`` and ``memory_budget``: what the inner compiler is told, with the results of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard import _torch
from fxshard.compare import Case
from fxshard.errors import PlanError
from fxshard.passes import lower
from fxshard.passes.config import Config
from fxshard.passes.lower import inner_compiler
from tests.ranks import part_alone
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool


def build() -> tuple[nn.Module, tuple[Tensor]]:
    """Return what communicates, draws and keeps much: all that must not be done twice."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.SiLU()), (
        torch.randn(2, 3, 9, 22),
    )


@pytest.mark.parametrize(
    ("inner_backend", "options"),
    [
        ("aot_eager", {"memory_budget": 0.2}),
        pytest.param("inductor", {"memory_budget": 0.2}, marks=pytest.mark.nightly),
    ],
)
def test_the_results_are_those_of_one_device(pool: RankPool, inner_backend: str, options: dict[str, Any]) -> None:
    assert_exact(pool, Case(build, inner_backend=inner_backend, options=options))


def test_inductor_is_told_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(lower, "lookup_backend", lambda _: lambda *_, **options: told.append(options))
    for mode in ("default", "reduce-overhead"):
        inner_compiler(Config((2,), None, None, mode=mode))(None, [])
    assert told == [{}, {"config_patches": {"triton.cudagraphs": True}}]


def test_torch_compile_takes_the_mode_where_it_is_at_home() -> None:
    image = torch.randn(1, 3, 8, 8)
    net = torch.compile(nn.Conv2d(3, 4, 3), backend="fxshard", mode="max-autotune")
    with pytest.raises(PlanError, match="times kernels"):
        net(image)


def test_parameters_are_known_to_stay_in_their_place() -> None:
    """CUDA graphs copy what is not, at each call."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    torch.compile(model, backend=backend)(torch.randn(1, 3, 8, 8))
    theirs = found[0]
    ours = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    for node in theirs.graph.find_nodes(op="placeholder"):
        ours.graph.placeholder(node.name)
    _torch.hand_on(theirs, ours)
    static = [bool(n.meta["tensor_dict"]) for n in ours.graph.find_nodes(op="placeholder")]
    assert static.count(True) == len([*model.parameters(), *model.buffers()])
    assert static.count(False) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode='fast' is not known; use 'default' or 'reduce-overhead'$"),
        ({"mode": "reduce-overhead", "inner_backend": "eager"}, "is Inductor's, and inner_backend='eager'"),
        ({"memory_budget": 0}, "memory_budget=0 is no part"),
        ({"memory_budget": 1.5}, "memory_budget=1.5 is no part"),
        ({"memory_budget": 0.5, "inner_backend": "eager"}, "use inner_backend='inductor' or 'aot_eager'"),
        ({"memory_budget": 0.5, "mode": "reduce-overhead"}, "one had wrong results"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxshard.transform(nn.Conv2d(3, 4, 3), **options)


@pytest.mark.nightly
def test_a_part_in_every_mode_is_that_of_one_device() -> None:
    command = [sys.executable, "-m", "tests.ranks.part_alone"]
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["mode"] for row in found] == list(part_alone.MODES)
    assert all(row["draws alike"] for row in found)
    assert max(row["worst"] for row in found) < 1e-5

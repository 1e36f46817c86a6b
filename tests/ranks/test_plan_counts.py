"""A plan without ranks says what real ranks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard import backend
from fxshard.report import PlanReport, describe
from fxshard.workers import mesh

if TYPE_CHECKING:
    from fxshard.workers import RankPool


def small_net() -> nn.Module:
    down = nn.Sequential(nn.Conv2d(3, 4, 7, padding=3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(down, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def report_of_real_ranks(rank: int, shape: tuple[int, ...], dims: list[int]) -> PlanReport | None:
    """Return the report of a real compilation (runs in a rank process)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    found: list[PlanReport] = []
    observe = lambda *graphs: found.append(describe(*graphs))  # noqa: E731
    backend.on_compiled.append(observe)
    try:
        sharded = fxshard.transform(
            small_net(), mesh=mesh(shape), placements=[Shard(d) for d in dims], inner_backend="eager"
        )
        sharded(torch.zeros(2, 3, 24, 64)).sum().backward()
    finally:
        backend.on_compiled.remove(observe)
    return found[0]


@pytest.mark.parametrize(("shape", "dims"), [((3,), [3]), ((2,), [2]), ((2, 2), [2, 3])], ids=str)
def test_a_plan_says_what_real_ranks_send(pool: RankPool, shape: tuple[int, ...], dims: list[int]) -> None:
    plan = fxshard.plan(
        small_net().to("meta"),
        torch.empty(2, 3, 24, 64, device="meta"),
        mesh_shape=shape,
        placements=[Shard(d) for d in dims],
    )
    reports = pool.run(report_of_real_ranks, shape, dims, ranks=torch.Size(shape).numel())
    (real,) = (r for r in reports if r.coords == plan.report.coords)
    assert plan.report.total.of("halo").bytes > 0
    assert plan.report.total == real.total
    assert [n.layout for n in plan.report.nodes] == [n.layout for n in real.nodes]

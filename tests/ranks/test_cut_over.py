"""What is cheaper whole, or asked for, runs whole on every rank: exact, and as the costs say."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import fxshard
from fxshard.compare import Case
from fxshard.devices import H200, Device, Link
from fxshard.errors import PlanError
from fxshard.values import plan_of
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool

SLOW = Device("a slow one", 1e8, 1e8, 1e8, 1e9, 0.0, 1.0, Link(exchange_us=9000.0, reduce_us=100.0, bytes_per_s=1e12))
"""An exchange takes as long as a megaflop, forward and backward: half of a large layer, all of a small one."""


def encoder() -> tuple[nn.Module, tuple[Tensor]]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)), (torch.randn(2, 3, 32, 96),)


class Hourglass(nn.Module):
    """Large, small, and large again, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        small = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*small)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 4, 4), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.down(x))
        deep = self.deep(nn.functional.max_pool2d(skip, 4))
        y: Tensor = self.out(torch.cat([skip, self.up(deep)], 1))
        return y


def hourglass() -> tuple[nn.Module, tuple[Tensor]]:
    return Hourglass(), (torch.randn(2, 3, 32, 96),)


def split_convolutions(model: nn.Module, image: Tensor, **options: Any) -> set[str]:
    """Return the modules whose convolutions are split in a plan for two ranks."""
    found = fxshard.plan(model, image, world_size=2, placements=[Shard(3)], **options)
    return {
        about.module.partition(".")[0]
        for about, node in zip(found.report.nodes, found.planned.graph.nodes, strict=True)
        if "conv" in str(node.target) and (plan := plan_of(node)) and plan.sharded_axes
    }


@pytest.mark.parametrize("build", [encoder, hourglass])
def test_a_small_late_map_is_whole_where_that_is_cheaper(pool: RankPool, build: Any) -> None:
    verdict = assert_exact(pool, Case(build, options={"device": SLOW}), gathers=True)
    assert any("cheaper whole on a slow one" in reason for reason in verdict.reasons)
    assert verdict.split


def test_what_is_large_is_split_again_behind_it() -> None:
    model, (image,) = hourglass()
    assert split_convolutions(model, image) == {"down", "deep", "up", "out"}
    assert split_convolutions(model, image, device=SLOW) == {"down", "up", "out"}
    assert split_convolutions(model, image, device=H200) == set()  # microseconds of work


def test_modules_run_whole_as_asked(pool: RankPool) -> None:
    placements = {"": [Shard(3)], "d*p": Replicate()}
    case = Case(hourglass, placements)
    verdict = assert_exact(pool, case, gathers=True)
    assert verdict.reasons == ("asked for: 'd*p' runs whole",)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            {"": [Shard(3)], "decoder.*": Replicate()},
            r"placements\['decoder.\*'\] is the path of no module .*; the outermost modules are down, deep, up, out$",
        ),
        ({"": [Shard(3)], "depe.*": Replicate()}, r"placements\['depe.\*'\] is the path .*; near it is deep$"),
        ({"deep": Shard(2)}, r"placements\['deep'\] is Shard\(dim=2\): a module runs whole"),
    ],
)
def test_what_cannot_be_asked_for(placements: Any, message: str) -> None:
    model, (image,) = hourglass()
    with pytest.raises(PlanError, match=message):
        fxshard.plan(model, image, world_size=2, placements=placements)


def test_a_device_that_is_not_known() -> None:
    with pytest.raises(PlanError, match="device='h2000' is not in the table; use one of h200"):
        fxshard.transform(nn.Conv2d(3, 3, 3), device="h2000")(torch.ones(1, 3, 8, 8))


def test_the_estimate_is_said() -> None:
    model, (image,) = encoder()
    found = fxshard.plan(model, image, world_size=2, device=dataclasses.replace(H200, name="x", single_flops=1e9))
    rank, alone = found.step_s
    assert 0 < alone < 1
    times = f"estimated step on x: {1e3 * rank:.2f} ms, {alone / rank:.2f} times as fast as one device alone"
    assert f"{times}: an efficiency of {100 * alone / rank / 2:.0f} %" in str(found)


def test_a_node_says_what_the_alternative_would_cost() -> None:
    model, (image,) = hourglass()
    found = fxshard.plan(model, image, world_size=2, placements=[Shard(3)], device=SLOW)
    whole, split = found.explain("deep.0"), found.explain("down")
    assert re.search(r"estimated: split \d+\.\d us, whole \d+\.\d us; to gather its value \d+\.\d us", split)
    assert re.search(
        r"if it were whole, and with it 3 more: a step would take \d+\.\d us more, gathers included", split
    )
    assert re.search(r"if it were split: a step would take \d+\.\d us more", whole)
    assert "estimated" not in fxshard.plan(model, image, world_size=2, placements=[Shard(3)]).explain("down")


def test_the_dimension_with_the_least_time_is_split() -> None:
    tall = torch.randn(2, 3, 96, 32)
    model, _ = hourglass()
    found = fxshard.plan(model, tall, world_size=2, device=SLOW)
    times = [fxshard.plan(model, tall, world_size=2, placements=[Shard(d)], device=SLOW).step_s[0] for d in (0, 2, 3)]
    assert found.step_s[0] == min(times)
    assert found.config.dims == (0,)  # two images: nothing to wait for but the gradients


def mesh_for(exchange_us: float, bytes_per_s: float) -> tuple[int, ...]:
    device = dataclasses.replace(SLOW, link=Link(exchange_us=exchange_us, reduce_us=0.0, bytes_per_s=bytes_per_s))
    net = nn.Sequential(nn.Conv2d(3, 4, 7, padding=3), nn.Conv2d(4, 4, 7, padding=3), nn.AdaptiveAvgPool2d(1))
    return fxshard.plan(net, torch.randn(1, 3, 128, 128), world_size=4, device=device).config.mesh_shape


def test_a_mesh_has_two_axes_where_bytes_cost_and_one_where_messages_do() -> None:
    assert mesh_for(exchange_us=0.0, bytes_per_s=1e6) == (2, 2)  # a block has a shorter edge than a stripe
    assert mesh_for(exchange_us=100.0, bytes_per_s=1e12) == (4,)


def test_a_plan_keeps_to_a_limit_of_memory_or_says_what_would() -> None:
    model, (image,) = encoder()
    plan = functools.partial(fxshard.plan, world_size=2, placements=[Shard(3)], inner_backend="eager")
    needed = plan(model, image).memory.peak.bytes / 2**30
    assert plan(model, image, memory_limit_gib=1.01 * needed).memory.peak.bytes / 2**30 == needed
    limit = 0.7 * needed
    with pytest.raises(PlanError, match=r"2 ranks need [0-9.]+ KiB each, .* \d ranks are needed, and fewer") as refused:
        plan(model, image, memory_limit_gib=limit)
    enough = int(re.search(r"(\d) ranks are needed", str(refused.value))[1])  # type: ignore[index]
    plan(model, image, world_size=enough, memory_limit_gib=limit)
    with pytest.raises(PlanError, match=f"{enough} ranks are needed"):
        plan(model, image, world_size=enough - 1, memory_limit_gib=limit)
    with pytest.raises(PlanError, match="whole on every rank; no number of ranks is enough"):
        plan(model, image, memory_limit_gib=needed / 100)


def test_a_limit_is_kept_by_splitting_what_would_be_cheaper_whole() -> None:
    model, (image,) = encoder()
    plan = functools.partial(fxshard.plan, world_size=2, placements=[Shard(3)], inner_backend="eager")
    split, cheapest = plan(model, image).memory.peak.bytes, plan(model, image, device="h200").memory.peak.bytes
    assert split < cheapest  # small as it is, all of it is whole on an H200
    limit = (split + cheapest) / 2**31
    assert plan(model, image, device="h200", memory_limit_gib=limit).memory.peak.bytes == split

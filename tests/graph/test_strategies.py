"""The planner's choice against what one would do by hand, and its costs against those of the plan that is made."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest

from fxshard.candidates import mesh_shapes, splits
from fxshard.cut import cheapest_split, cost_of
from fxshard.cut_over import as_asked, cheaper_whole, choices, in_the_middle
from fxshard.devices import H200
from fxshard.estimates import estimates
from fxshard.node_costs import WHOLE, costs
from fxshard.passes.config import Config
from tools import compare_strategies as by_hand
from tools.networks import UNet, made_by

if TYPE_CHECKING:
    from torch import fx

    from fxshard.cut_over import Choice
    from fxshard.devices import Device

SLOW = dataclasses.replace(H200, name="slow", single_flops=1e12, depthwise_flops=2e11, bytes_per_s=2e11)
"""So slow that small images are work enough for some ranks, where they are not deep down."""
EXCHANGES_US = (20, 50, 200)
ROWS = {
    "convnext": by_hand.Row(
        "", partial(made_by, "timm", "create_model", "convnext_atto"), (1, 3, 96, 512), by_hand.CONVNEXT[::2]
    ),
    "resnet18": by_hand.Row("", partial(made_by, "torchvision.models", "resnet18"), (2, 3, 128, 256), by_hand.RESNET),
    "unet": by_hand.Row("", partial(UNet, 2, width=8, levels=4), (1, 3, 96, 256), by_hand._unet_stages(4)[::3]),
    "unet3d": by_hand.Row(
        "", partial(UNet, 3, width=8, levels=3, inputs=1), (1, 1, 32, 32, 64), by_hand._unet_stages(3)[::2]
    ),
}


@cache
def captured(name: str) -> fx.GraphModule:
    return by_hand.captured(ROWS[name])


@pytest.mark.parametrize(("name", "ranks"), [("convnext", 8), ("unet", 8), ("unet3d", 2)])
def test_no_simple_strategy_is_quicker(name: str, ranks: int) -> None:
    found = by_hand.column("", captured(name), ROWS[name], ranks, SLOW)
    assert found.plan <= found.best
    assert len(found.by_hand) >= 2 * len(ROWS[name].stages)
    assert max(found.by_hand.values()) > 1.2 * found.plan


@pytest.mark.parametrize(
    ("name", "mesh", "dims"),
    [
        ("convnext", (8,), (3,)),
        ("convnext", (2, 4), (2, 3)),
        ("resnet18", (4,), (2,)),
        ("unet", (4,), (2,)),
        ("unet3d", (2, 2), (2, 4)),
    ],
)
def test_what_is_saved_is_what_the_cut_says(name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    config, through = in_the_middle(Config(mesh, dims, None)), 0
    for exchange_us in EXCHANGES_US:
        device = dataclasses.replace(SLOW, link=dataclasses.replace(SLOW.link, exchange_us=exchange_us))
        split = as_asked(captured(name), config, device)
        values = costs(split.graph, config, split.waits_ns, device)
        whole = cheaper_whole(values, device)
        before, after = cost_of(values, frozenset(values) - {WHOLE}), cost_of(values, cheapest_split(values))
        assert before is not None
        assert after is not None
        cut = as_asked(split.graph, dataclasses.replace(config, whole=whole), device)
        assert split.step_ns - cut.step_ns == pytest.approx(before - after, abs=1000)
        through += 0 < len(whole) < len(values) - 1
    assert through, "no cut goes through the network"


@pytest.mark.parametrize(("name", "ranks", "exchange_us"), [("resnet18", 4, 200.0), ("unet3d", 2, 50.0)])
def test_a_node_the_other_way_costs_what_the_plan_says(name: str, ranks: int, exchange_us: float) -> None:
    device = dataclasses.replace(SLOW, link=dataclasses.replace(SLOW.link, exchange_us=exchange_us))
    best = choices(captured(name), config=Config((ranks,), (2,), None), device=device)[0]
    found = estimates(best, device)
    alone = {n: e for n, e in found.items() if e.otherwise_us is not None and not e.with_it}
    split, whole = ([n for n, e in alone.items() if e.is_split is way][:3] for way in (True, False))
    for turned in split:
        config = dataclasses.replace(best.config, whole=(*best.config.whole, (turned, "to see")))
        assert made_us(best, config, device) == pytest.approx(alone[turned].otherwise_us, abs=1)
    for turned in whole:
        config = dataclasses.replace(best.config, whole=tuple(w for w in best.config.whole if w[0] != turned))
        assert made_us(best, config, device) == pytest.approx(alone[turned].otherwise_us, abs=1)
    assert {e.is_split for e in found.values() if e.otherwise_us is not None} == {True, False}
    assert split or whole
    assert sum(e.here_us for e in found.values()) == pytest.approx(best.step_ns / 1e3, abs=1)


def made_us(best: Choice, config: Config, device: Device) -> float:
    """Return how much longer the plan takes that is made otherwise."""
    return (as_asked(best.graph, config, device).step_ns - best.step_ns) / 1e3


def test_an_image_has_its_meshes_and_their_splits() -> None:
    assert mesh_shapes(64, (7, 3, 512, 8192)) == ((64,), (2, 32))
    assert mesh_shapes(64, (7, 3, 8192, 512)) == ((64,), (32, 2))
    assert mesh_shapes(64, (1, 1, 16)) == mesh_shapes(64, ()) == ((64,),)
    assert splits((7, 3, 8192, 512), (32, 2)) == [(2, 3), (2, 0), (3, 0)]
    assert splits((7, 3, 16, 16), (64,)) == []

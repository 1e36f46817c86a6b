"""What a plan predicts, without ranks, is what ranks hand to gloo: to the byte and the message, forward and backward.

The prediction is :func:`fxshard.plan` on the meta device, in the process of the tests; the measurement is read from
what the rank processes hand to gloo in the second step (:mod:`tests.ranks.handed_over`), and knows nothing of graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard._torch import collectives_started
from fxshard.compare import Case, transformed
from fxshard.emitter import Rank
from fxshard.ops import Traffic
from fxshard.passes.pipeline import localized
from fxshard.report import describe
from fxshard.trace import build_model, cotangent_loss
from fxshard.workers import mesh
from tests.ranks.handed_over import handed_over
from tools.networks import UNet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fxshard.workers import RankPool

KINDS = {"swap": ("halo", "redistribute"), "gather": ("gather",), "sum": ("reduce", "gradient")}
"""The kinds of a report that travel by each kind of collective."""
DIMS = {"D": 2, "H": -2, "W": -1}
AT_NIGHT = (pytest.mark.nightly, pytest.mark.timeout(900))

MODELS = ("convnext_atto", "resnet50", "unet", "unet3d", "deeplabv3")


def network(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    import timm
    import torchvision

    build: dict[str, Any] = {
        "convnext_atto": lambda: timm.create_model(name, drop_path_rate=0.3),
        "resnet50": torchvision.models.resnet50,
        "unet": lambda: UNet(2, width=4, levels=4),
        "unet3d": lambda: UNet(3, width=4, levels=3, inputs=1),
        "deeplabv3": lambda: torchvision.models.segmentation.deeplabv3_resnet50(
            weights=None, weights_backbone=None, aux_loss=True
        ),
    }
    return build[name](), (torch.zeros(shape),)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        model: Its name.
        shape: Of the image.
        split: A letter for each mesh axis.
        mesh: Ranks on each mesh axis.
        backend: The inner backend.
    """

    model: str
    shape: tuple[int, ...]
    split: str
    mesh: tuple[int, ...]
    backend: str = "eager"

    def __str__(self) -> str:
        sizes, ranks = ("x".join(map(str, s)) for s in (self.shape, self.mesh))
        return f"{self.model}-{sizes}-{self.split}-{ranks}-{self.backend}"

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(DIMS[letter] % len(self.shape) for letter in self.split)

    @property
    def case(self) -> Case:
        return Case(
            partial(network, self.model, self.shape),
            tuple(Shard(d) for d in self.dims),
            self.mesh,
            self.backend,
            dtype=torch.float32,
        )


@dataclass(frozen=True)
class Step:
    """What a rank hands over in a step, by kind of collective."""

    forward: Mapping[str, Traffic]
    backward: Mapping[str, Traffic]


def measured(rank: int, case: Case) -> Step:
    """Return what this rank hands over in the second step, of inputs without gradients (in a rank process)."""
    model, inputs = build_model(case)
    assert isinstance(inputs, tuple)
    net = transformed(model, case)
    cotangent_loss(net(*inputs)).backward()
    before = collectives_started()
    with handed_over() as forward:
        loss = cotangent_loss(net(*inputs))
    with handed_over() as backward:
        loss.backward()
    assert collectives_started() - before == forward.calls + backward.calls, "one went past the count"
    return Step(forward.sent, backward.sent)


def predicted(row: Row) -> dict[tuple[int, ...], Step]:
    """Return what each rank of the mesh will hand over, by its place."""
    with torch.device("meta"):
        plan = fxshard.plan(
            *network(row.model, row.shape), mesh_shape=row.mesh, placements=[Shard(d) for d in row.dims]
        )
    found = {}
    for coords in itertools.product(*map(range, row.mesh)):
        config = dataclasses.replace(plan.config, rank=Rank(coords, plan.config.rank.groups))  # type: ignore[union-attr]
        report = describe(plan.planned, localized(plan.planned, config=config), config)
        assert coords != plan.report.coords or report == plan.report
        found[coords] = Step(by_collective(report.total.forward), by_collective(report.total.backward))
    return found


def by_collective(sent: Mapping[str, Traffic]) -> dict[str, Traffic]:
    sums = {kind: sum((sent.get(k, Traffic()) for k in kinds), Traffic()) for kind, kinds in KINDS.items()}
    return {kind: total for kind, total in sums.items() if total != Traffic()}


EACH_CHANGE = (
    Row("convnext_atto", (2, 3, 64, 128), "W", (2,)),
    Row("resnet50", (1, 3, 65, 96), "W", (2,)),
    Row("unet", (1, 3, 64, 96), "W", (2,)),
    Row("unet3d", (1, 1, 16, 16, 32), "D", (2,), "aot_eager"),
)
SIZES = {
    "convnext_atto": (2, 3, 97, 256),
    "resnet50": (2, 3, 96, 256),
    "unet": (1, 3, 96, 256),
    "unet3d": (1, 1, 32, 48, 64),
    "deeplabv3": (2, 3, 97, 256),
}
NIGHTLY = (
    [
        Row(model, SIZES[model], split, mesh, backend)
        for model in MODELS
        for split, mesh in (("W", (2,)), ("H", (3,)), ("W", (4,)), ("HW", (2, 2)))
        for backend in ("eager", "aot_eager")
    ]
    + [
        Row("unet", (1, 3, 64, 96), "HW", (2, 2)),
        Row("deeplabv3", (2, 3, 64, 96), "W", (2,)),
        Row("unet3d", (1, 1, 24, 16, 32), "D", (3,)),
    ]
    + [Row(model, SIZES[model], "W", (2,), "inductor") for model in ("convnext_atto", "unet")]
)


def three_collectives(rank: int) -> dict[str, Traffic]:
    """Hand over tensors whose sizes are plain to see (in a rank process)."""
    functional, (name,) = torch.ops._c10d_functional, {mesh((3,)).get_group().group_name}
    sizes = [0, 5, 2] if rank == 0 else [0, rank, 0]
    received = [[0, 0, 0], [5, 1, 2], [2, 0, 0]][rank]
    with handed_over() as found:
        for made in (
            functional.all_reduce(torch.ones(7, dtype=torch.float64), "sum", name),
            functional.all_gather_into_tensor(torch.ones(2, 3), 3, name),
            functional.all_to_all_single(torch.ones(sum(sizes), dtype=torch.int8), received, sizes, name),
        ):
            functional.wait_tensor(made)
    assert found.calls == 3
    return found.sent


def test_the_count_is_of_what_goes_to_others(pool: RankPool) -> None:
    common = {"sum": Traffic(1, 7 * 8), "gather": Traffic(2, 2 * 6 * 4)}
    swaps = [Traffic(2, 7), Traffic(0, 0), Traffic(1, 2)]
    assert pool.run(three_collectives, ranks=3) == [{**common, "swap": swap} for swap in swaps]


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(r, id=str(r)) for r in EACH_CHANGE),
        *(pytest.param(r, id=str(r), marks=AT_NIGHT) for r in NIGHTLY),
    ],
)
def test_a_plan_predicts_what_ranks_hand_over(pool: RankPool, row: Row) -> None:
    steps = pool.run(measured, row.case, ranks=math.prod(row.mesh), timeout_s=600)
    for (coords, expected), found in zip(predicted(row).items(), steps, strict=True):
        assert found == expected, f"rank {coords}"
        assert found.forward["swap"].bytes > 0
        assert found.backward["sum"].bytes > 0


def test_every_model_has_a_row() -> None:
    assert {row.model for row in NIGHTLY} == set(MODELS)
    assert {row.model for row in EACH_CHANGE} == set(MODELS) - {"deeplabv3"}  # whose first step takes half a minute

"""A program as a user writes it, under ``mypy --strict``: what fxshard returns has a type, and none is Any.

``mypy`` checks it with the sources, ``tools/smoke_package.py`` against the installed package, and
``tests/ranks/test_user_script.py`` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fxshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Net(nn.Module):
    """Classifies pixels."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.classes = classes
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, classes, H, W)."""
        logits: Tensor = self.body(x)
        return logits


def train(mesh: DeviceMesh, images: Tensor, labels: Tensor) -> float:
    """Train a step on whole images and return the loss."""
    net = fxshard.transform(Net(), mesh=mesh, placements=[Shard(3)], inner_backend="eager", check_every=10)
    assert_type(net, Net)
    assert_type(net.classes, int)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train_parts(mesh: DeviceMesh, columns: Tensor, labels: Tensor) -> float:
    """Train a step on this rank's columns and return the loss of all of them."""
    net = fxshard.transform(
        Net(), mesh=mesh, placements=[Shard(3)], inner_backend="eager", inputs="local", outputs="local"
    )
    out = net(columns)
    assert isinstance(out, DTensor)
    loss = nn.functional.cross_entropy(out, DTensor.from_local(labels, mesh, [Shard(2)]))
    loss.backward()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def compiled(mesh: DeviceMesh, images: Tensor) -> Tensor:
    """Return what the backend computes."""
    options: dict[str, Any] = {"mesh": mesh, "placements": [Shard(3)], "inner_backend": "eager"}
    net = torch.compile(Net(), backend="fxshard", options=options)
    logits: Tensor = net(images)
    return logits


def looked_at(folder: Path) -> list[Path]:
    """Return the files of a plan."""
    image = torch.empty(2, 3, 8, 32)
    plan = fxshard.plan(Net(), image, world_size=2, placements=[Shard(3)])
    assert_type(plan, fxshard.Plan)
    assert_type(plan.summary(), str)
    assert_type(plan.explain("body.0"), str)
    assert_type(plan.diff(fxshard.plan(Net(), [image], mesh_shape=(2, 2), rng="counter", training=False)), str)
    assert_type(plan.code, str)
    assert_type(plan.memory.peak.bytes, int)
    assert_type(plan.memory.timeline[0].module, str)
    assert_type(plan.report.total.of("halo").messages, int)
    assert_type(plan.report.nodes[0].layout, str)
    assert_type(plan.stages()["body.0"][0].sent.of("halo").bytes, int)
    assert_type(plan.save(folder / "plan.json"), Path)
    return [plan.save(folder / name, memory=False) for name in ("plan.txt", "plan.html")]


def refused() -> str:
    """Return what fxshard says of a mesh that cannot be."""
    try:
        fxshard.plan(Net(), torch.empty(2, 3, 8, 32), world_size=0)
    except fxshard.FxShardError as error:
        return str(error)
    return ""


def with_inputs() -> tuple[nn.Module, tuple[Tensor]]:
    """Return what the ranks of a verification build."""
    return Net(), (torch.randn(1, 3, 8, 16),)


def verified() -> bool:
    """Return whether two ranks agree with one device."""
    found = fxshard.verify(with_inputs, world_size=2, placements=[Shard(3)], dtypes=["float64"], bisect=True)
    assert_type(found, fxshard.Verification)
    assert_type(found.to_json(), str)
    assert_type(found.judged["float64"], tuple[bool, ...])
    assert_type(found.differences["float64"][0].error, float)
    assert_type(found.culprit.node if found.culprit else None, str | None)
    return found.exact

"""What the backend refuses before it needs a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.backend import fxshard
from fxshard.errors import CaptureError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rng": "dice"}, r"rng='dice' is not known; use 'match' or 'counter'"),
        ({"meshes": None}, r"unknown options \['meshes'\]; .* mesh, placements, inner_backend, rng, outputs"),
    ],
    ids=["rng", "name"],
)
def test_bad_options_are_refused_when_the_graph_is_called(options: dict[str, Any], message: str) -> None:
    compiled = fxshard(fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(1)], options=options)
    with pytest.raises(PlanError, match=message):
        compiled(torch.ones(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": 2}, "mesh=2 is no DeviceMesh; make one with .*init_device_mesh"),
        ({"inner_backend": "nobackend"}, "inner_backend='nobackend' is not known; use one of .*inductor"),
        ({"placements": ["W"]}, r"placements has 'W'; it takes Shard\(dim\)"),
        ({"placements": [Shard(-1)]}, r"it takes Shard\(dim\) with dim >= 0"),
        ({"inputs": "locla"}, "inputs='locla' is not known; use 'global' or 'local'"),
        ({"rng": "dice"}, "use 'match' or 'counter'"),
    ],
    ids=str,
)
def test_transform_refuses_bad_options_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        transform(nn.Conv2d(3, 4, 3), **options)


def test_transform_explains_inputs_that_the_model_does_not_take() -> None:
    net = transform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), inner_backend="eager")
    with pytest.raises(CaptureError, match="Sequential does not run on these inputs: Given groups=1"):
        net(torch.zeros(1, 5, 8, 8))


def test_a_model_of_torch_nn_alone_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []

    def observe(gm: fx.GraphModule, *_: object, **__: object) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    monkeypatch.setattr("fxshard.api.compile_graph", observe)
    transform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))(torch.zeros(1, 3, 8, 8))
    transform(nn.Conv2d(3, 4, 3))(torch.zeros(1, 3, 8, 8))
    assert len(seen) == 2

"""What must not depend on the device, or on what was compiled before: no GPU is needed to see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard._torch import aot_export_module
from fxshard.passes import capture
from fxshard.passes.lower import cache_tag


def normalised(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).to(dtype)
    return net, torch.empty(2, 3, 16, 64, dtype=dtype)


def test_operators_are_captured_as_of_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a GPU a batch norm is captured as cudnn_batch_norm otherwise, which has no rule and was gathered
    seen = []

    def export(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.backends.cudnn.enabled)
        return exported(*args, **kwargs)

    exported = aot_export_module
    monkeypatch.setattr(capture, "aot_export_module", export)
    before = torch.backends.cudnn.enabled
    net, image = normalised(torch.float32)
    fxshard.plan(net, image, world_size=2, placements=[Shard(3)])
    assert seen == [False]
    assert torch.backends.cudnn.enabled == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_batch_norm_of_any_precision_stays_split(dtype: torch.dtype) -> None:
    net, image = normalised(dtype)
    assert fxshard.plan(net, image, world_size=2, placements=[Shard(3)]).report.reasons == {}


def test_code_that_recomputes_is_not_taken_for_code_that_keeps() -> None:
    tags = []
    for regions in ((), (7,), (9,), (7, 8)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        nodes = [graph.call_function(torch.relu, (x,)), graph.call_function(torch.sin, (x,))]
        for node, region in zip(nodes, regions, strict=False):
            node.meta |= {"recompute": "prefer", "ac_graph_id": region}
        graph.output(tuple(nodes))
        tags.append(cache_tag(fx.GraphModule({}, graph), ""))
    kept, first, same, both = tags
    assert first == same
    assert len({kept, first, both}) == 3

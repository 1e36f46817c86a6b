"""What the backend refuses before it needs a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxshard.backend import fxshard
from fxshard.errors import PlanError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rng": "dice"}, r"rng='dice' is not there; use one of \('match',\)"),
        ({"meshes": None}, r"unknown options \['meshes'\]; .* mesh, placements, inner_backend, rng"),
    ],
    ids=["rng", "name"],
)
def test_bad_options_are_refused_when_the_graph_is_called(options: dict[str, Any], message: str) -> None:
    compiled = fxshard(fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(1)], options=options)
    with pytest.raises(PlanError, match=message):
        compiled(torch.ones(1))

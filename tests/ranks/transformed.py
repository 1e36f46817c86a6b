"""A case's model transformed for the mesh that the case names, in a rank process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from torch import nn

    from fxshard.compare import Case


def transformed(model: nn.Module, case: Case) -> nn.Module:
    """Return ``model`` split as ``case`` says; what was compiled before is forgotten."""
    torch.compiler.reset()
    placements = None if case.placements is None else list(case.placements)
    return transform(
        model, mesh=mesh(case.mesh_shape), placements=placements, inner_backend=case.inner_backend, **case.options
    )

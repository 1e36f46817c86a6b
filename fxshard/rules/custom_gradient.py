"""A user's ``torch.autograd.Function``: its markers take every placement, gradients are placed as what they are for.

See :mod:`fxshard.ops.custom_gradient`.  The bodies between the markers are plain operators under their own rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard.rules.rule import Choice, Row, rule

if TYPE_CHECKING:
    from fxshard.layout import Placement
    from fxshard.rules.call import OpCall


@rule(torch.ops.fxshard.cotangent.default, nested=True)
def place_cotangent(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Place the gradient as the output that it arrives at."""
    return Row(at, at)


@rule(torch.ops.fxshard.custom_gradient.default, nested=True, whole_gradients=True)
def place_custom_gradient(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave outputs and inputs where they are and bring each gradient to its input."""
    outputs, inputs = ([at[i] for i in call.positions.get(name, ())] for name in ("outputs", "inputs"))
    return Row((*outputs, *outputs, *inputs, *inputs), tuple(outputs))

"""Constant maps: zeros, ones and full tensors are whole until it is known who uses them.

Every position has the same value, so any part of the map is made as easily as the whole:
:func:`fxshard.passes.push_splits` gives such a tensor the split that its users want, and each rank makes its
own part.  Other factories (``arange``, ``linspace``, ``eye``) are small or grids; they are made whole and sliced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.rule import Choice, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten

CONSTANT_FACTORIES = (
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
"""Operators whose result has one value everywhere (or none), with its shape in the argument ``size``."""


@rule(*CONSTANT_FACTORIES, emit=lambda *a: _emit_part(*a), nested=True, split_as=lambda *a: _split(*a))
def place_factory(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Make it whole: only the dtype and device of an input matter."""
    return Row(at, (Replicate(),))


def _split(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row:
    return Row(at, (wanted,))


def _emit_part(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    args, kwargs = call.rebind(inputs, size=emitter.local_shape(call.out_shape, plan.outputs[0]))
    return emitter.call(call.op, *args, **kwargs)

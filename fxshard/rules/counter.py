"""Counted draws: any part is made as easily as the whole, so they are split as their users want.

``fxshard::counter`` hashes each element's place in the whole tensor; a rank begins to count where its part begins::

    counter(..., size=[2, 8, 64], start=[0, 0, 0],  length=[2, 8, 64])      whole
    counter(..., size=[2, 8, 64], start=[0, 0, 32], length=[2, 8, 32])      rank 1 of 2

:func:`fxshard.passes.push_splits` decides, as for constant maps.
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

ops = torch.ops.fxshard


@rule(ops.counter.default, emit=lambda *a: _emit_part(*a), split_as=lambda *a: _split(*a))
def place_counter(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Make it whole until it is known who uses it."""
    return Row(at, (Replicate(),))


def _split(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row | None:
    """Return the row of a part that is one interval of the dimension."""
    return Row(at, (wanted,)) if wanted.outer == 1 else None


def _emit_part(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    start, length = list(call["start"]), list(call["length"])
    for axis, placement in enumerate(plan.outputs[0]):
        if isinstance(placement, Shard):
            lo, hi = placement.interval(emitter.rank.coords[axis])
            start[placement.dim], length[placement.dim] = lo, hi - lo
    args, kwargs = call.rebind(inputs, start=start, length=length)
    return emitter.call(call.op, *args, **kwargs)

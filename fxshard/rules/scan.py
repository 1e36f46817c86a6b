"""Cumulative sums and products along a split dimension: the local scan, shifted by what the ranks before have.

    rank 0   [a b]     scan [a, a+b]
    rank 1   [c d]     scan [c, c+d]     + (a+b), the totals of the ranks before

Only the totals travel.  Where the ranks do not own consecutive positions (a flattened dimension) the input is
gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Shard
from fxshard.rules.reduce import in_float32, is_low_precision, rank_table
from fxshard.rules.rule import Choice, Gather, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
MERGES = {
    aten.cumsum.default: (aten.sum.dim_IntList, aten.add.Tensor),
    aten.cumprod.default: (aten.prod.dim_int, aten.mul.Tensor),
}
"""How the totals before are put together, and what brings them into the local scan."""


@rule(*MERGES, emit=lambda *a: _emit_scan(*a))
def place_scan(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Scan locally; along a split dimension add the totals of the ranks before."""
    (shard,) = at
    assert isinstance(shard, Shard)
    if shard.dim == call["dim"] % len(call.shape(0)):
        if shard.outer != 1:
            return Gather("the scanned dimension is a flattened one")
        if is_low_precision(call):
            return in_float32(call)
    return Row(at, (shard,))


def _emit_scan(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    args, kwargs = call.rebind(inputs)
    scanned = emitter.call(call.op, *args, **kwargs)
    dim = call["dim"] % len(call.shape(0))
    for axis, shard in plan.inputs[0].shards(dim):
        scanned = _shifted(emitter, call, scanned, axis, shard)
    return scanned


def _shifted(emitter: Emitter, call: OpCall, scanned: Node, axis: int, shard: Shard) -> Node:
    merge, join = MERGES[call.op]
    total = emitter.call(aten.select.int, scanned, shard.dim, -1)
    table = emitter.sum_gradient(rank_table(emitter, total, axis, shard.ranks), axis)  # read by split work
    before = emitter.call(aten.slice.Tensor, table, 0, 0, emitter.rank.coords[axis])
    dims = [0] if merge is aten.sum.dim_IntList else 0
    offset = emitter.call(aten.unsqueeze.default, emitter.call(merge, before, dims), shard.dim)
    return emitter.call(join, scanned, offset)

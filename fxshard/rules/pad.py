"""Padding: what a rank fetches *is* the padded image, so padding a split dimension costs no copy of its own.

    padded column   0 ... p-1 | p ............ p+size-1 | ...       p < 0 crops
    input column   -p ... -1  | 0 ............ size-1   | size ...  outside: the mode's fill

    owned          |     rank 0      |     rank 1      |
    windows     [-p ...              b)[b          ... size+p')

Each rank keeps its own columns and those at the image's ends the padding: a halo exchange that is local unless
the padding reads what another rank owns (circular, or shards thinner than the padding).  The other dimensions
are padded by the local operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Fill, FillMode, Placement, Shard
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import split_dims, stencil_shards
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten

MODES: dict[torch._ops.OpOverload, FillMode] = {
    aten.reflection_pad1d.default: "reflect",
    aten.reflection_pad2d.default: "reflect",
    aten.reflection_pad3d.default: "reflect",
    aten.replication_pad1d.default: "replicate",
    aten.replication_pad2d.default: "replicate",
    aten.replication_pad3d.default: "replicate",
    aten._pad_circular.default: "circular",
    aten.constant_pad_nd.default: "constant",
}
"""The mode of each operator that has one; ``aten.pad`` names its own."""


def _amounts(call: OpCall) -> list[int]:
    """Return the padding, last dimension first: before, behind, before, behind, ..."""
    name = "padding" if "padding" in call.arguments else "pad"
    return list(call[name])


def _fill(call: OpCall) -> Fill:
    mode = MODES.get(call.op) or call["mode"]
    value = call.arguments.get("value")
    return Fill(mode, 0.0 if value is None else float(value))


@rule(aten.pad.default, *MODES, emit=lambda *a: _emit_pad(*a))
def place_pad(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch the padded columns of a split dimension; leave a split dimension that is not padded alone."""
    (image,) = at
    assert isinstance(image, Shard)
    amounts = _amounts(call)
    behind = 2 * (len(call.shape(0)) - 1 - image.dim)
    if not any(amounts[behind : behind + 2]):
        return Row((image,), (image,))
    if isinstance(call.arguments.get("value"), complex):
        return Gather("a complex constant")
    if _fill(call).mode == "circular" and min(amounts) < 0:
        if _overlaps(call.shape(0), amounts):
            return Gather("a circular padding wider than what a crop leaves: ATen does not write all of its result")
        return Expand(_circular_crop)
    stencil = Stencil(padding=amounts[behind])
    shards = stencil_shards(image, stencil, call.out_shape[image.dim], _fill(call))
    return shards if isinstance(shards, Gather) else Row((shards[0],), (shards[1],))


def _overlaps(shape: Sequence[int], amounts: Sequence[int]) -> bool:
    """Whether a padding is wider than what its dimension's crop leaves; ATen compares it with the whole dimension."""
    ends = zip(reversed(shape), amounts[::2], amounts[1::2], strict=False)
    return any(max(before, behind) > size + min(before, 0) + min(behind, 0) for size, before, behind in ends)


def _circular_crop(x: Tensor, pad: Sequence[int], *_: Any) -> Tensor:
    """Crop, then wrap what is left: a circular padding reads the cropped image."""
    cropped = aten.constant_pad_nd.default(x, [min(p, 0) for p in pad], 0)
    return aten._pad_circular.default(cropped, [max(p, 0) for p in pad])


def _emit_pad(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    amounts = _amounts(call)
    rank = len(call.shape(0))
    for dim in split_dims(plan):
        behind = 2 * (rank - 1 - dim)
        amounts[behind : behind + 2] = [0] * len(amounts[behind : behind + 2])
    if not any(amounts):
        return inputs[0]
    name = "padding" if "padding" in call.arguments else "pad"
    args, kwargs = call.rebind(inputs, **{name: amounts})
    return emitter.call(call.op, *args, **kwargs)

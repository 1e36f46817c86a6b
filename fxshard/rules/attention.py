"""Attention: queries stay split, keys and values are brought to every rank.

    o = softmax(scale q k^T + mask) v          q (..., L, E)   k (..., S, E)   v (..., S, F)

    split                  q             k, v            mask             o
    query tokens L         Shard(-2)     Replicate       Shard(-2)        Shard(-2)
    batch or heads         Shard         Shard           Shard            Shard
    key tokens S only      Replicate     Shard(-2)       Shard(-1)        by products and a softmax over ranks

Proof of the first row: every row of o depends on the same row of q.  A causal mask speaks of global positions
and is written out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.extremum import owned_positions
from fxshard.rules.pointwise import aligned
from fxshard.rules.reduce import wide
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default, emit=lambda *a: _emit_attention(*a), nested=True)
def place_attention(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep split queries, batches and heads; contract split keys."""
    assert call["dropout_p"] == 0, "the draw is an operator of its own, or refused"
    token = len(call.shape(0)) - 2
    query = at[0]
    if isinstance(query, Shard) and query.dim == token:
        return Row((query, Replicate(), Replicate(), *_masks(call, query)), (query,))
    for position, placement in enumerate(at[:3]):
        if isinstance(placement, Shard) and placement.dim < len(call.shape(position)) - 2:
            return _split_batch(call, _from_the_end(placement, len(call.shape(position)), token + 2))
    return Expand(_attention)


def _from_the_end(shard: Shard, rank: int, out_rank: int) -> Shard:
    return Shard(shard.dim + out_rank - rank, shard.bounds, shard.outer)


def _scores_shape(call: OpCall) -> tuple[int, ...]:
    return (*call.shape(0)[:-1], call.shape(1)[-2])


def _masks(call: OpCall, shard: Shard) -> tuple[Placement, ...]:
    """Return how the mask has to be placed, if there is one."""
    return tuple(aligned(call.shape(i), shard, _scores_shape(call)) for i in range(3, len(call.inputs)))


def _split_batch(call: OpCall, shard: Shard) -> Choice:
    rank = len(call.shape(0))
    sizes = [call.shape(i)[shard.dim - rank] for i in range(3)]
    if len(set(sizes)) > 1:
        return Gather(f"queries, keys and values have {sizes} positions in the split dimension")
    return Row((shard, shard, shard, *_masks(call, shard)), (shard,))


def _emit_attention(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit the operator on the local queries, a causal mask as what it says of their global positions."""
    token = len(call.shape(0)) - 2
    masked = call["is_causal"] and plan.inputs[0].shards(token)
    mask = _emit_causal_mask(emitter, call, plan, inputs[0]) if masked else inputs[3] if len(inputs) > 3 else None
    args, kwargs = call.rebind(inputs, attn_mask=mask, is_causal=call["is_causal"] and not masked)
    return emitter.call(call.op, *args, **kwargs)


def _emit_causal_mask(emitter: Emitter, call: OpCall, plan: NodePlan, query: Node) -> Node:
    length, keys = call.shape(0)[-2], call.shape(1)[-2]
    positions = owned_positions(plan.inputs[0], len(call.shape(0)) - 2, length, emitter.rank.coords)
    columns = emitter.call(aten.arange.default, keys, device=tensor_value(query).device)
    return emitter.call(aten.ge.Tensor, emitter.constant(columns, positions, -2), columns)


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    rows, columns = (torch.arange(x.shape[-2], device=x.device) for x in (query, key))
    return rows.unsqueeze(1) >= columns


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (wide(query) * factor) @ wide(key).transpose(-2, -1)
    mask = _causal_mask(query, key) if is_causal else attn_mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (aten._safe_softmax.default(scores, -1) @ wide(value)).to(query.dtype)

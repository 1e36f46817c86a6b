"""Random draws: whole on every rank, so that every rank draws what one device draws.

``replace_random`` has made every draw an ``fxshard::random`` node; what is split slices the draw's result::

    mask, token = random(...)       Replicate, Replicate
    x * mask                        x Shard(3): the mask is sliced, without communication
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.layout import Placement, Replicate
from fxshard.rules.rule import Choice, Row, rule

if TYPE_CHECKING:
    from fxshard.rules.call import OpCall

ops = torch.ops.fxshard


@rule(ops.random.default)
def place_random(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Bring what the draw depends on to every rank."""
    return Row((Replicate(),) * len(at), (Replicate(),) * len(call.output_values))


@rule(ops.keep_draws.default)
def place_keep_draws(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Pass the value through as it is; the token is whole."""
    return Row((at[0], Replicate()), (at[0],))

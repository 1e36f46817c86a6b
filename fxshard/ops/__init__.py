"""The communication operators, ``torch.ops.fxshard.*``: what a rewritten graph calls at run time.

They come in conjugate pairs, so autograd finds the backward of a rewritten graph by itself:

===================  ==============================  ====================================
operator             does                            backward
===================  ==============================  ====================================
``halo_exchange``    fetch each rank's window        ``halo_accumulate``
``halo_accumulate``  bring gradients home, add       ``halo_exchange`` with constant 0
``all_gather``       Shard -> Replicate              ``slice``
``slice``            Replicate -> Shard              ``all_gather``
``all_reduce``       Partial -> Replicate            ``sum_gradient`` (max, min: refused)
``sum_gradient``     identity                        ``all_reduce``
``redistribute``     Shard(a) -> Shard(b)            the reverse ``redistribute``
===================  ==============================  ====================================

``custom_gradient`` marks a backward of the user's own, ``renew`` a value that was written behind autograd's back,
``random`` draws what eager mode draws, ``counter`` a part of what a seed says, and ``detached`` is there while programs
are traced.  Importing this package defines all of them.  Ranks are group-relative and arguments, so that a graph says
on its own what a rank does.
"""

from __future__ import annotations

from fxshard.ops import (
    all_gather,
    all_reduce,
    counter,
    custom_gradient,
    depthwise,
    detached,
    halo_accumulate,
    halo_exchange,
    random,
    redistribute,
    renew,
    slice,  # noqa: A004  the operator's name
    sum_gradient,
)
from fxshard.ops.lowering import LOWERINGS, lowering_hash
from fxshard.ops.traffic import Traffic, node_traffic, traffic

__all__ = [
    "LOWERINGS",
    "Traffic",
    "all_gather",
    "all_reduce",
    "counter",
    "custom_gradient",
    "depthwise",
    "detached",
    "halo_accumulate",
    "halo_exchange",
    "lowering_hash",
    "node_traffic",
    "random",
    "redistribute",
    "renew",
    "slice",
    "sum_gradient",
    "traffic",
]

"""What a communication operator sends: messages and bytes of one rank, from its arguments alone.

=================  =======================================  =======================================
operator           messages                                 bytes
=================  =======================================  =======================================
halo_exchange      ranks it sends a piece to                columns it sends x the other dims
halo_accumulate    ranks it sends gradients to              columns it got before x the other dims
all_gather         n - 1                                    (n - 1) x its part, padded to the longest
redistribute       ranks it sends a non-empty part to       all of its part but what it keeps
all_reduce         1                                        the payload, once
slice              0                                        0
sum_gradient       0                                        0
=================  =======================================  =======================================

What an all-reduce really sends depends on the algorithm that the group picks (a ring: 2 (n - 1) / n of the
payload); the payload is what can be compared between plans.  A column that a rank sends to itself
(:mod:`fxshard.ops.recipe`) does not leave it and is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Fill, Window
from fxshard.ops.memory import with_size
from fxshard.window import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload
    from torch.fx import Node


@dataclass(frozen=True)
class Traffic:
    """What one rank sends.

    Args:
        messages: To how many ranks, or 1 for a reduction.
        bytes: How much in all.
    """

    messages: int = 0
    bytes: int = 0

    @property
    def noun(self) -> str:
        """What its messages are called: ``"message"`` where it is one."""
        return "message" if self.messages == 1 else "messages"

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def traffic(op: OpOverload, args: Sequence[Any], shape: Sequence[int], itemsize: int) -> Traffic:
    """Return what a rank sends in one call of ``op``.

    Args:
        op: One of ``torch.ops.fxshard``'s overloads.
        args: Its arguments after the tensor.
        shape: The local shape of the tensor.
        itemsize: Bytes per element.

    Raises:
        KeyError: ``op`` is not a communication operator.

    Example:
        >>> args = (1, (0, 4, 8), (-1, 3), (5, 9), "constant", 0.0, 0, "group")
        >>> traffic(torch.ops.fxshard.halo_exchange.default, args, (3, 4), itemsize=4)
        Traffic(messages=1, bytes=12)
    """
    messages, elements = _TRAFFIC[op](shape, *args)
    return Traffic(messages, elements * itemsize)


def node_traffic(node: Node) -> Traffic:
    """Return what this rank sends in ``node``, a call of a communication operator in a local graph.

    Args:
        node: Its first argument has the local fake tensor in ``meta["val"]``.
    """
    x, *args = node.args
    local = x.meta["val"]  # type: ignore[union-attr]
    return traffic(node.target, args, local.shape, local.element_size())  # type: ignore[arg-type]


def _exchange(bounds: Sequence[int], lo: Sequence[int], hi: Sequence[int], mode: Any, value: float) -> Exchange:
    return Exchange(tuple(bounds), Window(tuple(zip(lo, hi, strict=True)), Fill(mode, value)))


def _halo_exchange(shape: Sequence[int], dim: int, *args: Any) -> tuple[int, int]:
    *window, rank, _ = args
    exchange = _exchange(*window)
    return exchange.messages(rank), exchange.sent_columns(rank) * math.prod(with_size(shape, dim, 1))


def _halo_accumulate(shape: Sequence[int], dim: int, *args: Any) -> tuple[int, int]:
    *window, rank, _ = args
    exchange = _exchange(*window)
    columns = [exchange.columns(owner, rank) for owner in range(exchange.ranks)]
    return sum(c > 0 for c in columns), sum(columns) * math.prod(with_size(shape, dim, 1))


def _all_gather(shape: Sequence[int], dim: int, bounds: Sequence[int], outer: int, *_: Any) -> tuple[int, int]:
    others = len(bounds) - 2
    longest = max(hi - lo for lo, hi in pairwise(bounds))
    return others, others * math.prod(with_size(shape, dim, outer * longest))


def _redistribute(shape: Sequence[int], *args: Any) -> tuple[int, int]:
    _, _, to_dim, to_bounds, rank, _ = args
    per_position = math.prod(with_size(shape, to_dim, 1))
    sent = [per_position * (hi - lo) for r, (lo, hi) in enumerate(pairwise(to_bounds)) if r != rank]
    return sum(s > 0 for s in sent), sum(sent)


_TRAFFIC: dict[OpOverload, Callable[..., tuple[int, int]]] = {
    torch.ops.fxshard.halo_exchange.default: _halo_exchange,
    torch.ops.fxshard.halo_accumulate.default: _halo_accumulate,
    torch.ops.fxshard.all_gather.default: _all_gather,
    torch.ops.fxshard.redistribute.default: _redistribute,
    torch.ops.fxshard.all_reduce.default: lambda shape, *_: (1, math.prod(shape)),
    torch.ops.fxshard.slice.default: lambda *_: (0, 0),
    torch.ops.fxshard.sum_gradient.default: lambda *_: (0, 0),
}

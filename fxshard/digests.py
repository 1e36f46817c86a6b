"""Hashes of what ranks have to have in common: values, graphs, sequences of collectives, states of generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch import FakeTensor
from fxshard.meeting import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS_AT_A_TIME = 2**20
MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)
"""SplitMix64's increment and first multiplier, as signed integers."""
DIMENSIONS = ("dim", "from_dim", "to_dim")
"""How the schemas of collectives name dimensions."""


def checksum(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits in their order; equal tensors have equal hashes on one kind of device.

    The bits are read as integers and summed with a weight for each place, modulo 2^64, some at a time.

    Args:
        tensor: On any device; not more than a copy of it and a few megabytes are allocated there.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 4:  # no integers begin there
        bits = bits.clone()
    words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
    weights = _weights(min(words.numel(), WORDS_AT_A_TIME), words.device)
    sums = [(part.long() * weights[: part.numel()]).sum() for part in words.split(WORDS_AT_A_TIME)]
    return digest(torch.stack(sums).tolist())


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return well mixed integers of 64 bits: with regular ones, a block moved by a round number may not be seen."""
    mixed = torch.arange(1, count + 1, device=device) * MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 31)) * MULTIPLIERS[1]
    return mixed ^ (mixed >> 29)


def values_digest(tensors: Sequence[object]) -> str:
    """Return a hash of the values of the real tensors among ``tensors``."""
    return digest(
        checksum(t) for t in tensors if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) and t.numel()
    )


def graph_digest(graph: fx.GraphModule) -> str:
    """Return a hash of a graph's nodes and nested graphs, without the numbers of devices: each rank has its own."""
    nodes = (n for m in graph.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
    return digest(
        (n.op, n.name, getattr(n.target, "__name__", n.target), _unnumbered(n.args), _unnumbered(n.kwargs))
        for n in nodes
    )


def _unnumbered(arguments: Any) -> Any:
    return fx.node.map_aggregate(arguments, lambda a: a.type if isinstance(a, torch.device) else a)


def collectives_digest(local: fx.GraphModule) -> str:
    """Return a hash of a local graph's collectives, in order, without what differs from rank to rank."""
    return digest(
        (str(node.target), _geometry(node))
        for node in local.graph.nodes
        # a collective's last argument is its group
        if getattr(node.target, "namespace", "") == "fxshard" and isinstance(node.args[-1], str)
    )


def _geometry(collective: fx.Node) -> list[object]:
    """Return the arguments that are the same on every rank: not its place, nor how many positions it holds."""
    assert isinstance(collective.target, torch._ops.OpOverload)
    named = zip(collective.target._schema.arguments, collective.args[:-1], strict=False)
    return [a for schema, a in named if isinstance(a, (list, str, float)) or schema.name in DIMENSIONS]


def generator_digest() -> str:
    """Return a hash of the states of the default generators of this process."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return values_digest(states)

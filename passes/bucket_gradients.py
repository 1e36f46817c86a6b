"""Bucket gradients: many parameters share one all-reduce, which runs while the backward goes on.

Before::                                   After (:mod:`fxshard.ops.gradient_bucket`)::

    w_sum = sum_gradient(w)                    settled = gradient_settling_0(w, b)
    y = conv(x, w_sum)                         summed = gradient_sum_0(*settled)    before the first use of w or b
    b_sum = sum_gradient(b)                    y = conv(x, summed[0])
    z = add(y, b_sum)                          z = add(y, summed[1])

The gradient of a value is there when the backward of its first use is done, so the values are sorted by it, the latest
first, and cut into buckets.  A bucket is full as soon as it has ``bucket_cap_mb``, so there are at most as many full
ones as all gradients have of it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fxshard.emitter import RECOMPUTE_KEYS
from fxshard.ops.gradient_bucket import Bucket, SettleGradients, SumGradients
from fxshard.passes.hoist_sums import SUM
from fxshard.passes.outline import add_module
from fxshard.values import is_tensor, tensor_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import fx

    from fxshard.passes.config import Config

Groups: TypeAlias = "Callable[[tuple[str, ...]], tuple[str, ...]]"
"""Returns the groups to sum over for those of the axes."""
MEGABYTE = 2**20
"""What ``bucket_cap_mb`` counts, as in ``DistributedDataParallel``."""


@dataclass(frozen=True)
class Member:
    """A graph input whose gradient is summed.

    Args:
        sums: The nodes that do it, one for each mesh axis; the first reads the input.
        first_use: Where in the graph the result is first read.
    """

    sums: tuple[fx.Node, ...]
    first_use: int

    @property
    def source(self) -> fx.Node:
        """The graph input."""
        return self.sums[0].all_input_nodes[0]

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the process groups to sum over."""
        return tuple(str(node.args[1]) for node in self.sums)

    @property
    def value(self) -> torch.Tensor:
        """The fake value."""
        return tensor_value(self.source)


def gradient_buckets(graph: fx.Graph, config: Config) -> list[list[Member]]:
    """Return the values whose gradients are summed together, in the order in which the backward comes to them.

    Args:
        graph: A local graph.
        config: Has the size of a bucket and the type that travels.
    """
    kinds: dict[tuple[object, ...], list[list[Member]]] = {}
    for member in sorted(_members(graph), key=lambda m: -m.first_use):
        value = member.value
        buckets = kinds.setdefault((member.groups, value.dtype, value.device), [])
        if not buckets or bucket_bytes(buckets[-1], config) >= config.bucket_cap_mb * MEGABYTE:
            buckets.append([])
        buckets[-1].append(member)
    return sorted((b for buckets in kinds.values() for b in buckets), key=lambda b: -b[-1].first_use)


def bucket_bytes(members: Sequence[Member], config: Config) -> int:
    """Return what one rank gives to the all-reduce of ``members``, in bytes."""
    return sum(m.value.numel() * (config.reduce_dtype or m.value.dtype).itemsize for m in members)


def _members(graph: fx.Graph) -> Iterator[Member]:
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=SUM):
        source = node.args[0]
        if source.op == "placeholder" and is_tensor(source) and _is_summable(tensor_value(source)):
            sums = [node]
            while len(sums[-1].users) == 1 and next(iter(sums[-1].users)).target is SUM:
                sums.append(next(iter(sums[-1].users)))
            if sums[-1].users:
                yield Member(tuple(sums), min(places[user] for user in sums[-1].users))


def _is_summable(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0


def bucket_gradients(gm: fx.GraphModule, *, config: Config, groups: Groups = tuple) -> fx.GraphModule:
    """Sum the gradients of graph inputs in buckets.

    Args:
        gm: A local graph.
        config: Has the size of a bucket and the type that travels.
        groups: Returns the process groups that gradients are summed over in place of those of the axes.

    Returns:
        ``gm``.
    """
    buckets = gradient_buckets(gm.graph, config)
    if not buckets:
        return gm
    sums = {m.sums[0] for members in buckets for m in members}
    start = next(node for node in gm.graph.nodes if node in sums)
    for members in buckets:
        dtype = config.reduce_dtype or members[0].value.dtype
        _emit(gm, members, Bucket(groups(members[0].groups), dtype), start)
    for members in buckets:
        for node in (node for member in members for node in reversed(member.sums)):
            gm.graph.erase_node(node)
    return gm


def _emit(gm: fx.GraphModule, members: Sequence[Member], bucket: Bucket, start: fx.Node) -> None:
    """Emit one bucket: its settling before ``start``, its sum where the last of ``members`` is first used.

    ``start`` is where gradients are recorded, and what comes after it comes before it in the backward.
    """
    summing = add_module(gm, "gradient_sum", SumGradients(bucket))
    settling = add_module(gm, "gradient_settling", SettleGradients(bucket))
    with gm.graph.inserting_before(start):
        settled = _call(gm, settling, [m.source for m in members], len(members) + 1)
    with gm.graph.inserting_before(members[-1].sums[-1].next):
        summed = _call(gm, summing, settled, len(members))
    for member, made in zip(members, summed, strict=True):
        made.meta.update({k: v for k, v in member.sums[-1].meta.items() if k not in RECOMPUTE_KEYS})
        member.sums[-1].replace_all_uses_with(made)


def _call(gm: fx.GraphModule, name: str, inputs: Sequence[fx.Node], count: int) -> list[fx.Node]:
    made = gm.graph.call_module(name, tuple(inputs))
    return [gm.graph.call_function(operator.getitem, (made, i)) for i in range(count)]

"""What a node of a planned graph costs a rank in a step: an estimate from the table of devices.

::

    compute    max(FLOPs / flops per second, bytes read and written / bytes per second) + a kernel, forward
               twice that in the backward, where a gradient passes
    a rank's   the largest part of the node's largest split value; all of it where nothing is split
    traffic    a wait for each exchange + bytes / bytes per second; gradients of parameters travel in buckets beside
               the backward, and count by their bytes

A view costs nothing, nor does what has as many elements as the data say.  All times are integers, in nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxshard._torch import is_composite
from fxshard.layout import Shard
from fxshard.ops.traffic import traffic
from fxshard.report import Communication
from fxshard.values import depends_on_data, passes_gradient, plan_of

if TYPE_CHECKING:
    from torch import fx

    from fxshard.devices import Device, Link
    from fxshard.layout import Layout

NS = 1e9
BACKWARD = 2
"""How much longer the backward of an operator takes than its forward: one product for each of its two operands."""


def compute_ns(node: fx.Node, device: Device, *, training: bool) -> int:
    """Return how long the whole of a node's work takes one device.

    Args:
        node: Of a captured graph.
        device: Of the table.
        training: Whether its backward runs, too.
    """
    values = [v for v in _values(node) if isinstance(v, torch.Tensor)]
    if not isinstance(node.target, OpOverload) or not values or _is_view(node.target) or depends_on_data(node):
        return 0
    seconds = flops(node) / device.flops(values[-1].dtype, depthwise=_is_depthwise(node))
    seconds = max(seconds, sum(v.numel() * v.element_size() for v in values) / device.bytes_per_s)
    times = 1 + BACKWARD * (training and passes_gradient(node))
    return round(times * (seconds * NS + device.kernel_us * 1e3))


def share_of(node: fx.Node) -> float:
    """Return the part of a planned node's work that the busiest rank does."""
    found = plan_of(node)
    layouts = [] if found is None else [*found.inputs, *found.outputs]
    return min((_largest_part(layout) for layout in layouts), default=1.0)


def _largest_part(layout: Layout) -> float:
    parts = (max(p.length(r) for r in range(p.ranks)) / max(p.size, 1) for p in layout if isinstance(p, Shard))
    return math.prod(parts)


def traffic_ns(sent: Communication, link: Link, *, in_bucket: bool = True) -> int:
    """Return how long a rank waits for what it sends.

    Args:
        sent: By kind, in one exchange each way.
        link: Of the table.
        in_bucket: Whether a gradient is one of a parameter.
    """
    total, gradient_us = 0.0, 0.0 if in_bucket else link.reduce_us
    for kind, its in (*sent.forward.items(), *sent.backward.items()):
        wait_us = {"gradient": gradient_us, "reduce": link.reduce_us}.get(kind, link.exchange_us)
        total += bool(its.bytes) * wait_us * 1e3 + its.bytes / link.bytes_per_s * NS
    return round(total)


def gather_ns(value: torch.Tensor, layout: Layout, coords: tuple[int, ...], link: Link) -> int:
    """Return how long it takes to put a split value together on every rank, one mesh axis after the other.

    Args:
        value: The whole one, fake.
        layout: How it is split; it is as long to cut its gradient's parts together where it is whole.
        coords: The rank whose wait it is.
        link: Of the table.
    """
    shape, total = list(layout.local_shape(value.shape, coords)), 0
    for axis, placement in reversed(list(enumerate(layout))):
        if isinstance(placement, Shard):
            outer = shape[placement.dim] // max(placement.length(coords[axis]), 1)
            args = (placement.dim, placement.bounds, outer)
            sent = traffic(torch.ops.fxshard.all_gather.default, args, shape, value.element_size())
            total += traffic_ns(Communication({"gather": sent}), link)
            shape[placement.dim] = outer * placement.size
    return total


def _values(node: fx.Node) -> list[Any]:
    """Return what a node reads and makes, the latter last."""
    return tree_leaves([n.meta.get("val") for n in (*node.all_input_nodes, node)])


def flops(node: fx.Node) -> int:
    """Return the operations of a node's convolutions and matrix products on the global values; torch counts no others.

    Args:
        node: Of a captured graph.
    """
    op = node.target
    if not isinstance(op, OpOverload) or not (is_composite(op) or op.overloadpacket in flop_registry):
        return 0
    kinds: Any = map_arg((node.args, node.kwargs), lambda n: _Kind.of(n.meta["val"]))  # its containers can be hashed
    return _flops(op, *kinds)


@dataclass(frozen=True)
class _Kind:
    """What the operations of a call depend on.

    Args:
        shape: Of a tensor.
        dtype: Its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the kind of a tensor, and what is none as it is."""
        return cls(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


@lru_cache(maxsize=4096)
def _flops(op: OpOverload, args: Any, kwargs: Any) -> int:
    """Return the operations of a call; a network has few kinds of them, and a planner asks for each split."""
    given, named = tree_map(
        lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, _Kind) else v, (args, kwargs)
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        op(*given, **named)
    return int(counter.get_total_flops())


def _is_depthwise(node: fx.Node) -> bool:
    """Return whether a convolution has a filter for each channel."""
    schema = node.target._schema.arguments if isinstance(node.target, OpOverload) else []
    place = next((i for i, argument in enumerate(schema) if argument.name == "groups"), len(node.args))
    groups = node.args[place] if place < len(node.args) else 1
    weight: Any = node.all_input_nodes[1].meta["val"] if len(node.all_input_nodes) > 1 else None
    return bool(groups != 1 and isinstance(weight, torch.Tensor) and groups == weight.shape[0])


def _is_view(op: OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)

"""What each node costs split and whole, and what its value costs where the one kind reads the other.

The costs are those of a rank in the middle of the mesh, on every rank: all have to decide the same.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fxshard.cost import compute_ns, gather_ns, share_of
from fxshard.cut import Value
from fxshard.layout import Shard
from fxshard.passes.plan import image_inputs, split_dims, splits_again
from fxshard.rules import OpCall
from fxshard.step_time import is_trained
from fxshard.values import is_tensor, passes_gradient, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from fxshard.devices import Device
    from fxshard.passes.config import Config

WHOLE = "what is whole in any case"
"""Stands for the readers that cannot be split."""


def costs(graph: fx.GraphModule, config: Config, waits_ns: Mapping[str, int], device: Device) -> dict[str, Value]:
    """Return what the nodes cost that can be split, by name, and one for those that cannot.

    Args:
        graph: Planned as if every split were worth it.
        config: Of the plan, for a rank in the middle of the mesh.
        waits_ns: How long that rank waits for what it sends for each node, by name.
        device: Of the table.
    """
    able = [n for n in graph.graph.nodes if n.op == "call_function" and _is_split(n)]
    nodes = _Splittable(graph, config, waits_ns, device, frozenset(n.name for n in able))
    return {WHOLE: Value(None, 0), **{node.name: nodes.value_of(node) for node in able}}


@dataclass(frozen=True)
class _Splittable:
    """The nodes that can be split.

    Args:
        graph: As for :func:`costs`.
        config: As for :func:`costs`.
        waits_ns: As for :func:`costs`.
        device: Of the table.
        names: Theirs.
    """

    graph: fx.GraphModule
    config: Config
    waits_ns: Mapping[str, int]
    device: Device
    names: frozenset[str]

    @cached_property
    def training(self) -> bool:
        """Whether there is a backward."""
        return is_trained(self.graph)

    @cached_property
    def image_dims(self) -> int:
        """How many dimensions an image has."""
        return max((tensor_value(n).ndim for n in image_inputs(self.graph)), default=0)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """What each mesh axis splits."""
        return split_dims(self.graph, self.config)

    def value_of(self, node: fx.Node) -> Value:
        """Return what a node costs split and whole, and at its borders."""
        whole = compute_ns(node, self.device, training=self.training)
        split = round(whole * share_of(node)) + self.waits_ns[node.name]
        needs = self._needs(node)
        if not _leaves_split(node):
            return Value(split, whole, needs=needs)
        gather = self._gather_ns(node) if is_tensor(node) else None  # of several values a getitem reads one
        scatter = gather if self.training and passes_gradient(node) else 0
        return Value(split, whole, gather, scatter, self._readers(node), needs)

    def _needs(self, node: fx.Node) -> tuple[str, ...]:
        """Return the nodes that have to be split for this one to be."""
        inputs = [n for n in node.all_input_nodes if n.name in self.names]
        if node.target is operator.getitem:
            return tuple(n.name for n in inputs)
        return () if self._splits_again(node) else tuple(n.name for n in inputs if _leaves_split(n))

    def _splits_again(self, node: fx.Node) -> bool:
        """Return whether a node would be split so, too, if what it reads were whole."""
        found = plan_of(node)
        if found is None or not isinstance(node.target, torch._ops.OpOverload):
            return False
        call, ranks = OpCall(node), self.config.mesh_shape
        return all(splits_again(call, self.dims[axis], ranks[axis], self.image_dims) for axis in found.sharded_axes)

    def _readers(self, node: fx.Node) -> tuple[str, ...]:
        users = [u for u in node.users if not (self.config.local_outputs and u.op == "output")]
        return tuple(dict.fromkeys(u.name if u.name in self.names else WHOLE for u in users))

    def _gather_ns(self, node: fx.Node) -> int:
        found, rank = plan_of(node), self.config.rank
        assert found is not None
        assert rank is not None
        return gather_ns(tensor_value(node), found.outputs[0], rank.coords, self.device.link)


def _is_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and bool(found.sharded_axes)


def _leaves_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and any(isinstance(p, Shard) for layout in found.outputs for p in layout)

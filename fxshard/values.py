"""What a graph node stands for: its fake value, and the plan that the planner wrote on it.

One metadata key, ``node.meta["fxshard"]``, one frozen dataclass, two accessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Replicate

if TYPE_CHECKING:
    from torch.fx import Node

    from fxshard.layout import Layout

KEY = "fxshard"
ORIGIN = "fxshard_origin"
"""The key of a local node's metadata that names the planned node it was emitted for."""


@dataclass(frozen=True)
class NodePlan:
    """The planner's decision for one node.

    Args:
        inputs: The layout that each tensor input is wanted in, in schema order.
        outputs: The layout of each output.
        reason: Why something is gathered here; empty where nothing is.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    reason: str = ""

    @property
    def sharded_axes(self) -> frozenset[int]:
        """The mesh axes along which ranks do different work here."""
        layouts = (*self.inputs, *self.outputs)
        return frozenset(a for layout in layouts for a, p in enumerate(layout) if not isinstance(p, Replicate))


def plan_of(node: Node) -> NodePlan | None:
    """Return the plan written on ``node``, or None."""
    found = node.meta.get(KEY)
    assert found is None or isinstance(found, NodePlan)
    return found


def set_plan(node: Node, plan: NodePlan) -> None:
    """Write ``plan`` on ``node``."""
    node.meta[KEY] = plan


def tensor_value(node: Node) -> torch.Tensor:
    """Return the fake tensor that ``node`` stands for.

    Args:
        node: A node whose ``meta["val"]`` is one tensor.
    """
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.format_node()} stands for {type(value).__name__}, not a tensor"
    return value


def is_tensor(node: Node) -> bool:
    """Return whether ``node`` stands for one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)

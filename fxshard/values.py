"""What a graph node stands for: its fake value, and the plan that the planner wrote on it.

The plan is one metadata key, ``node.meta["fxshard"]``, one frozen dataclass, two accessors; under another a local node
has the name of the planned one that it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from fxshard.layout import Replicate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.layout import Layout

KEY = "fxshard"
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
ORIGIN = "fxshard_origin"
"""The key of a local node's metadata that names the planned node it was emitted for."""


@dataclass(frozen=True)
class NodePlan:
    """The planner's decision for one node.

    Args:
        inputs: The layout that each tensor input is wanted in, in schema order.
        outputs: The layout of each output.
        reason: Why something is gathered here, or an input not split; empty where it is as asked.
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


def described(value: object) -> str:
    """Return the type and the shape of a tensor as they are read, or another value as it is.

    Example:
        >>> described(torch.ones(2, 3)), described(True)
        ('float32[2, 3]', 'True')
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def is_tensor(node: Node) -> bool:
    """Return whether ``node`` stands for one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def depends_on_data(node: Node) -> bool:
    """Return whether a size or a number of the value of ``node``, or of what it reads, is known only from the data.

    Args:
        node: Of any graph.  ``x[x > 0]`` has as many elements as are positive, ``x.max().item()`` is a number.
    """
    return any(map(_is_symbolic, (node, *node.all_input_nodes)))


def _is_symbolic(node: Node) -> bool:
    leaves = tree_leaves(node.meta.get("val"))
    numbers = [n for leaf in leaves for n in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
    return any(isinstance(number, SYMBOLS) for number in numbers)


def passes_gradient(node: Node) -> bool:
    """Return whether a gradient comes through ``node``, given that one of its inputs needs one.

    Args:
        node: Of any graph.  One whose value is not known counts: a gradient must not be lost.

    Example:
        >>> graph = torch.fx.Graph()
        >>> node = graph.call_function(torch.argmax, (graph.placeholder("x"),))
        >>> passes_gradient(node)
        True
        >>> node.meta["val"] = torch.tensor(3)
        >>> passes_gradient(node)
        False
    """
    if node.target is torch.ops.aten.detach.default:
        return False
    value = node.meta.get("val")
    return value is None or any(_may_need_gradient(leaf) for leaf in tree_leaves(value))


def _may_need_gradient(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return not isinstance(leaf, (int, float, complex, str, *SYMBOLS, type(None)))


LEAST_DIMENSIONS = 3
"""Of an image: batch or channels, and what may be split."""
BYTES = (torch.uint8, torch.bool)
"""The dtypes of images beside the floating ones."""


def image_positions(values: Sequence[object]) -> list[int]:
    """Return which of a model's inputs are image-like.

    Those are the floating ones with the most dimensions, three or more, and bytes and masks with as many: a camera's
    image may come as bytes.  Integers are labels and positions.

    Args:
        values: The inputs, tensors among them.

    Example:
        >>> image_positions([torch.ones(2, 3, 8, 8), torch.ones(2, 3, 8, 8).long(), torch.ones(2, 5), "bilinear"])
        [0]
        >>> image_positions([torch.ones(2, 3, 8, 8, dtype=torch.uint8), torch.ones(2, 5)])
        [0]
    """
    tensors = [v if isinstance(v, torch.Tensor) else None for v in values]
    floating = [v.ndim for v in tensors if v is not None and v.is_floating_point() and v.ndim >= LEAST_DIMENSIONS]
    dims = [0 if v is None or not (v.is_floating_point() or v.dtype in BYTES) else v.ndim for v in tensors]
    most = max(floating or (LEAST_DIMENSIONS, *dims))
    return [i for i, count in enumerate(dims) if count == most]

"""Plan: write a layout on every node of the global graph.

The plain strategy: image-like inputs are split as asked (default: their largest spatial dimension), every
operator's rule is asked in program order what it does with the layouts its inputs have, and what no rule
covers is gathered with its reason.  Calls that a rule expands are replaced in the graph and planned.

Before::                                       After::

    conv2d(x, w)                               conv2d      [S(3; 0,32,64)]
    _native_batch_norm_legit_functional        var_mean    [R], sub [S(3; ...)], ...
"""

from __future__ import annotations

import itertools
import operator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxshard.errors import PlanError
from fxshard.layout import Layout, Partial, Placement, Replicate, Shard, even_bounds, replicated
from fxshard.near_names import near_modules
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.splice import splice
from fxshard.provenance import module_path
from fxshard.rules import Expand, Gather, OpCall, Row, find_rule
from fxshard.rules.strided import refuse_nested_readers
from fxshard.values import (
    LEAST_DIMENSIONS,
    NodePlan,
    depends_on_data,
    described,
    image_positions,
    is_tensor,
    plan_of,
    set_plan,
    tensor_value,
)

if TYPE_CHECKING:
    from fxshard.passes.config import Config

ALIGNMENTS = (64, 32, 16, 8, 4, 2, 1)
MOST_IMBALANCE = 1 / 16
"""How much longer than the mean the longest shard may be for the sake of aligned bounds."""


LEAST_COLUMNS = 2
"""How many columns for each rank a gathered map needs to be split again."""


def plan(gm: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Write a :class:`~fxshard.values.NodePlan` on every node.

    Args:
        gm: A captured graph (:func:`fxshard.passes.capture.capture`); expanded calls are replaced in it.
        config: The mesh and what is asked.

    Returns:
        ``gm``.

    Raises:
        PlanError: No input has the dimension that is to be split, or no module the path that is to run whole.
    """
    _check_modules(gm, config)
    planner = _Planner(gm, config)
    node = next(iter(gm.graph.nodes))
    while node.op != "root":
        node = planner.visit(node)
    return gm


def aligned_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Return bounds on the largest power of two up to 64 that keeps the shards balanced.

    Example:
        >>> aligned_bounds(2048, 2), aligned_bounds(97, 3)
        ((0, 1024, 2048), (0, 32, 64, 97))
    """
    for multiple in ALIGNMENTS:
        bounds = even_bounds(size, ranks, multiple)
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        if min(lengths) > 0 and max(lengths) * ranks <= size * (1 + MOST_IMBALANCE):
            return bounds
    return even_bounds(size, ranks)


def splits_again(call: OpCall, dim: int, ranks: int, image_dims: int) -> bool:
    """Return whether an operator splits a map that was gathered: it is worth it, and has columns enough for every rank.

    Args:
        call: Its call; the first input is the map.
        dim: What the mesh axis splits, -1 for nothing.
        ranks: On the mesh axis.
        image_dims: Dimensions of an image.
    """
    found = find_rule(call.op)
    if not (found and found.enters and dim >= 0 and ranks > 1 and len(call.shape(0)) == image_dims):
        return False
    return min(call.shape(0)[dim], call.out_shape[dim]) >= LEAST_COLUMNS * ranks


def _user_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the tensors among the inputs that are not the model's state."""
    captured: Captured = gm.meta[KEY]
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [n for n, state in zip(placeholders, captured.is_state, strict=True) if not state and is_tensor(n)]


def image_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the image-like inputs that are not the model's state."""
    inputs = _user_inputs(gm)
    return [inputs[i] for i in image_positions([tensor_value(n) for n in inputs])]


def split_dims(gm: fx.GraphModule, config: Config) -> tuple[int, ...]:
    """Return the dimension that each mesh axis splits: as asked, or the largest spatial ones; -1 for none.

    Raises:
        PlanError: A dimension is asked for that no image-like input has.
    """
    images = image_inputs(gm)
    if config.dims is not None:
        _check_dims(gm, config)
        return config.dims
    shape = max((tuple(tensor_value(n).shape) for n in images), default=())
    order = sorted(range(2, len(shape)), key=lambda d: (-shape[d], -d))[: len(config.mesh_shape)]
    return (*sorted(order), *(-1,) * (len(config.mesh_shape) - len(order)))


def _check_dims(gm: fx.GraphModule, config: Config) -> None:
    """Check that the image-like inputs have the dimensions that are asked for.

    Raises:
        PlanError: They do not, or there is no such input.
    """
    images, most = image_inputs(gm), max(config.dims or (), default=-1)
    if most < 0 or config.parts or (config.piece and not images):
        return
    if not images:
        found = ", ".join(described(tensor_value(n)) for n in _user_inputs(gm)) or "none"
        msg = (
            f"placements split dim {most}, but no input is an image (floating or bytes, {LEAST_DIMENSIONS} or more "
            f"dimensions); inputs: {found}. Pass the image as such an input, or give placements=None to run without a "
            "split"
        )
        raise PlanError(msg)
    ndim = tensor_value(images[0]).ndim
    if most >= ndim:
        shapes = [tuple(tensor_value(n).shape) for n in images]
        msg = f"placements split dim {most} of inputs of shapes {shapes}; name a dim below {ndim}"
        raise PlanError(msg)


def _check_modules(gm: fx.GraphModule, config: Config) -> None:
    """Check that each pattern of modules that run whole is some module's.

    Raises:
        PlanError: One is not.
    """
    paths = dict.fromkeys(module_path(n) for n in gm.graph.nodes)
    for pattern in config.whole_modules:
        if not config.piece and not any(_is_within(path, pattern) for path in paths):
            msg = f"placements[{pattern!r}] is the path of no module that computes something"
            raise PlanError(msg + near_modules(pattern, paths))


def why_whole(node: fx.Node, config: Config) -> str:
    """Return why a node that could be split is not, as asked or decided; nothing where it may be."""
    path = module_path(node)
    pattern = next((p for p in config.whole_modules if _is_within(path, p)), None)
    decided = next((why for name, why in config.whole if name == node.name), "")
    return f"asked for: {pattern!r} runs whole" if pattern else decided


def _is_within(path: str, pattern: str) -> bool:
    """Return whether a module, or one that it is in, has a path of this pattern."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


def why_not_split(gm: fx.GraphModule, config: Config) -> dict[fx.Node, str]:
    """Return for each input that could be expected to be split, and is not, why: what nobody splits runs on every rank.

    Args:
        gm: A captured graph.
        config: The mesh and what is asked.
    """
    images, axes = image_inputs(gm), zip(split_dims(gm, config), config.mesh_shape, strict=True)
    if config.parts:
        return {}
    if not images and (config.dims is None or config.piece):
        reason = f"no input is floating or bytes with {LEAST_DIMENSIONS} or more dimensions, nothing is split"
        return dict.fromkeys(_user_inputs(gm), reason)
    reasons = []
    for axis, (dim, ranks) in enumerate(axes):
        columns = max((tensor_value(n).shape[dim] for n in images), default=0) if dim >= 0 else 0
        if dim >= 0 and columns < ranks:
            reasons.append(f"dim {dim} has {columns} columns for {ranks} ranks, it is not split")
        elif dim < 0 and config.dims is None and ranks > 1:
            reasons.append(f"mesh axis {axis} has no dimension left to split")
    return dict.fromkeys(images, "; ".join(reasons))


class _Planner:
    """Visits the nodes in program order."""

    def __init__(self, gm: fx.GraphModule, config: Config) -> None:
        self.gm = gm
        self.config = config
        self.dims = split_dims(gm, config)
        self.not_split = why_not_split(gm, config)
        self.images = set(image_inputs(gm))
        self.image_dims = max((tensor_value(n).ndim for n in self.images), default=0)
        self.bounds: dict[tuple[int, int], tuple[int, ...]] = {}
        self.whole = replicated(len(config.mesh_shape))
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.given = {inputs[number]: layout for number, layout in config.parts}
        for layout in self.given.values():
            self._keep_bounds(layout)

    def visit(self, node: fx.Node) -> fx.Node:
        """Plan ``node`` and return the next node to visit."""
        if node.op == "placeholder":
            layout = self._input_layout(node)
            set_plan(node, NodePlan((), (layout,), self.not_split.get(node, "")))
        elif node.op == "output":
            set_plan(node, NodePlan((self.whole,) * len(node.all_input_nodes), ()))
        elif node.op == "call_function":
            return self._visit_call(node)
        else:
            set_plan(node, NodePlan((), (self.whole,)))
        return node.next

    def _input_layout(self, node: fx.Node) -> Layout:
        if node in self.given:
            return self.given[node]
        axes: list[Placement] = []
        for axis, (dim, ranks) in enumerate(zip(self.dims, self.config.mesh_shape, strict=True)):
            size = tensor_value(node).shape[dim] if node in self.images and 0 <= dim < tensor_value(node).ndim else 0
            bounds = self.bounds.get((axis, size)) or aligned_bounds(size, ranks)
            axes.append(Shard(dim, bounds) if size >= ranks > 1 else Replicate())
        return Layout(tuple(axes))

    def _visit_call(self, node: fx.Node) -> fx.Node:
        data = depends_on_data(node)
        if isinstance(node.target, torch._ops.OpOverload) and not data:
            return self._visit_operator(node)
        parents = node.all_input_nodes
        if node.target is operator.getitem and plan_of(parents[0]) is not None:
            layout = _outputs(parents[0])[node.args[1]]  # type: ignore[index]
            self.images |= {node} if parents[0] in self.images else set()
            set_plan(node, NodePlan((layout,), (layout,)))
        else:
            refuse_nested_readers(node)
            gathered = any(not layout.is_replicated for p in parents for layout in _outputs(p))
            why = f"{node.target}: a size or a number depends on data" if data else f"no rule for {node.target}"
            set_plan(
                node, NodePlan((self.whole,) * len(parents), (self.whole,) * _count(node), why if gathered else "")
            )
        return node.next

    def _visit_operator(self, node: fx.Node) -> fx.Node:
        call = OpCall(node)
        why = why_whole(node, self.config)
        if why:
            return self._keep_whole(call, why)
        layouts = [_settled(_outputs(n)[0]) for n in call.inputs]
        rows, reasons = [], []
        for axis in range(len(self.whole.axes)):
            at = self._entered(call, axis, tuple(layout[axis] for layout in layouts))
            choice = _choose(call, at, self._split_twice(layouts, axis))
            if isinstance(choice, Expand):
                first = splice(self.gm, call, choice)
                if first is not None:
                    return first
                choice = Gather(f"no rule for {call.op}")
            if isinstance(choice, Gather):
                reasons.append(choice.reason)
                choice = _whole_row(call)
            rows.append(choice)
        inputs = tuple(Layout(tuple(row.inputs[i] for row in rows)) for i in range(len(call.inputs)))
        outputs = tuple(Layout(tuple(row.outputs[i] for row in rows)) for i in range(len(call.output_values)))
        set_plan(node, NodePlan(inputs, outputs, "; ".join(dict.fromkeys(reasons))))
        self._remember(call, outputs)
        return node.next

    def _keep_whole(self, call: OpCall, why: str) -> fx.Node:
        row, axes = _whole_row(call), len(self.whole.axes)
        split = any(not _outputs(n)[0].is_replicated for n in call.inputs)
        layouts = [Layout((placement,) * axes) for placement in (*row.inputs, *row.outputs)]
        inputs, outputs = tuple(layouts[: len(row.inputs)]), tuple(layouts[len(row.inputs) :])
        set_plan(call.node, NodePlan(inputs, outputs, why if split else ""))
        self._remember(call, outputs)
        return call.node.next

    def _remember(self, call: OpCall, outputs: tuple[Layout, ...]) -> None:
        """Keep the bounds of each map size, and which values come from an image."""
        if any(n in self.images for n in call.inputs):
            self.images.add(call.node)
        if outputs:
            self._keep_bounds(outputs[0])

    def _keep_bounds(self, layout: Layout) -> None:
        for axis, placement in enumerate(layout):
            if isinstance(placement, Shard) and placement.dim == self.dims[axis] and placement.outer == 1:
                self.bounds[axis, placement.size] = placement.bounds

    def _entered(self, call: OpCall, axis: int, at: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Split a map again that was gathered before, where the operator has enough columns for every rank."""
        dim, ranks = self.dims[axis], self.config.mesh_shape[axis]
        whole = all(isinstance(p, Replicate) for p in at)
        if not (whole and splits_again(call, dim, ranks, self.image_dims) and call.inputs[0] in self.images):
            return at
        size = call.shape(0)[dim]
        return (Shard(dim, self.bounds.get((axis, size)) or aligned_bounds(size, ranks)), *at[1:])

    def _split_twice(self, layouts: list[Layout], axis: int) -> bool:
        """Whether an earlier axis splits the same dimension of an input as ``axis``."""
        for layout in layouts:
            own = layout[axis]
            if isinstance(own, Shard) and any(isinstance(p, Shard) and p.dim == own.dim for p in layout.axes[:axis]):
                return True
        return False


def _outputs(node: fx.Node) -> tuple[Layout, ...]:
    found = plan_of(node)
    assert found is not None, f"{node.format_node()} is used before it is planned"
    return found.outputs


def _settled(layout: Layout) -> Layout:
    """Return the layout that a rule is asked about: terms count as summed, windows as what is owned."""
    return Layout(
        tuple(Replicate() if isinstance(p, Partial) else p.owned if isinstance(p, Shard) else p for p in layout)
    )


def _count(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else 1


def _whole_row(call: OpCall) -> Row:
    return Row((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.output_values))


def _choose(call: OpCall, at: tuple[Placement, ...], split_twice: bool) -> Row | Gather | Expand:
    found = find_rule(call.op)
    split = any(isinstance(p, Shard) for p in at)
    if not split and not (found and found.always):
        return _whole_row(call)
    if found is None:
        return Expand(call.op)  # by the operator's own decomposition
    if split_twice and not found.nested:
        return Gather(f"{call.op} has a dimension that two mesh axes split")
    choice = found.place(call, at)
    return Gather(f"{call.op}: {choice.reason}") if isinstance(choice, Gather) else choice

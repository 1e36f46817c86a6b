"""Push splits: a replicated value that only split work uses is made in parts.

Before::                                     After (rank 1 of 2)::

    zeros([2, 64, 512, 4096])   [R]          zeros([2, 64, 512, 2048])   [S(3; 0,2048,4096)]
    slice = fxshard.slice(zeros, ...)
    cat([x, slice], 1)                       cat([x, zeros], 1)

    noise = counter(..., whole)              noise = counter(..., its part)
    mul(noise, 0.1)             [R]          mul(noise, 0.1)             [S(3; 0,2048,4096)]
    slice = fxshard.slice(mul, ...)
    add(x, slice)                            add(x, mul)

From the last node to the first: what a node wants of its inputs is known before they are looked at.  A rule with
``split_as`` says how its operator is made in parts.  Nothing more travels, the whole map is never allocated.  What is
to run whole stays whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Layout, Replicate, Shard
from fxshard.passes.plan import why_whole
from fxshard.rules import OpCall, Row, find_rule
from fxshard.values import plan_of, set_plan

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config
    from fxshard.values import NodePlan


def push_splits(gm: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Give each replicated value the layout that all its users want, where that is one and split.

    Args:
        gm: A planned graph.
        config: The mesh and what is asked.

    Returns:
        ``gm``.
    """
    for node in reversed(gm.graph.nodes):
        found, wanted = plan_of(node), _wanted_of(node)
        if found is None or wanted is None or not all(layout.is_replicated for layout in found.outputs):
            continue
        if why_whole(node, config):
            continue
        rows = _rows(node, found, wanted)
        if rows:
            inputs = tuple(Layout(tuple(row.inputs[i] for row in rows)) for i in range(len(found.inputs)))
            set_plan(node, replace(found, inputs=inputs, outputs=(wanted,)))
    return gm


def _wanted_of(node: fx.Node) -> Layout | None:
    """Return the one split layout in which all users want a node, or None."""
    wanted = {layout for user in node.users for layout in _wanted(node, user)}
    only = wanted.pop() if len(wanted) == 1 else None
    return None if only is None or only.is_replicated else only


def _wanted(node: fx.Node, user: fx.Node) -> set[Layout | None]:
    """Return the layouts in which ``user`` wants ``node``; None for one that cannot be made in parts."""
    found = plan_of(user)
    if found is None or not isinstance(user.target, torch._ops.OpOverload):
        return {None}
    layouts = (layout for n, layout in zip(OpCall(user).inputs, found.inputs, strict=True) if n is node)
    # a held window overlaps its neighbours': as parts it would have to be exchanged
    return {None if any(isinstance(p, Shard) and p.held for p in layout) else layout for layout in layouts}


def _rows(node: fx.Node, found: NodePlan, wanted: Layout) -> list[Row]:
    """Return the row of each axis, or nothing where the operator is not made in such parts."""
    rule = find_rule(node.target)
    dims = [p.dim for p in wanted if isinstance(p, Shard)]
    if rule is None or rule.split_as is None or (len(set(dims)) < len(dims) and not rule.nested):
        return []
    call = OpCall(node)
    if len(call.output_values) != 1:
        return []
    rows = []
    for axis, placement in enumerate(wanted):
        at = tuple(layout[axis] for layout in found.inputs)
        split = isinstance(placement, Shard)
        rows.append(rule.split_as(call, at, placement) if split else Row(at, (Replicate(),)))  # type: ignore[arg-type]
    return [row for row in rows if row is not None] if None not in rows else []

"""Shrink factories: a constant map that only split work uses is made in parts.

Before::                                     After (rank 1 of 2)::

    zeros([2, 64, 512, 4096])   [R]          zeros([2, 64, 512, 2048])   [S(3; 0,2048,4096)]
    slice = fxshard.slice(zeros, ...)
    cat([x, slice], 1)                       cat([x, zeros], 1)

Nothing travels either way; the whole map is never allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Layout, Shard
from fxshard.rules import OpCall
from fxshard.rules.factory import CONSTANT_FACTORIES
from fxshard.values import plan_of, set_plan

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config


def shrink_factories(gm: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Give each constant map the layout that all its users want, where that is one and split.

    Args:
        gm: A planned graph.
        config: The mesh and what is asked.

    Returns:
        ``gm``.
    """
    for node in gm.graph.nodes:
        found = plan_of(node)
        if node.target in CONSTANT_FACTORIES and found is not None:
            wanted = {layout for user in node.users for layout in _wanted(node, user)}
            if len(wanted) == 1 and None not in wanted:
                set_plan(node, replace(found, outputs=tuple(wanted)))  # type: ignore[arg-type]  # not None
    return gm


def _wanted(node: fx.Node, user: fx.Node) -> set[Layout | None]:
    """Return the layouts in which ``user`` wants ``node``; None for one that cannot be made in parts."""
    found = plan_of(user)
    if found is None or not isinstance(user.target, torch._ops.OpOverload):
        return {None}
    layouts = (layout for n, layout in zip(OpCall(user).inputs, found.inputs, strict=True) if n is node)
    # a held window overlaps its neighbours': as parts it would have to be exchanged
    return {None if any(isinstance(p, Shard) and p.held for p in layout) else layout for layout in layouts}

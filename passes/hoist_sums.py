"""Hoist sums: the gradient of a parameter is summed once, as the parameter is.

Before::                                          After::

    reshape = view(gamma)                             summed = sum_gradient(gamma)
    summed = sum_gradient(reshape)                    reshape = view(summed)
    cast = to(weight, bfloat16)                       summed_1 = sum_gradient(weight)
    summed_1 = sum_gradient(cast)                     cast = to(summed_1, bfloat16)

A backward is linear in the gradient that arrives, and what an operator makes of a replicated value alone is the same
on every rank: ``sum(J' g) = J' sum(g)``.  So a sum may move to before an operator, if all that reads the operator's
result is summed.  It then runs in the parameter's own type and fits into a bucket; two sums of one value become one.
"""

from __future__ import annotations

import torch
from torch import fx

from fxshard.provenance import is_communication
from fxshard.values import is_tensor, tensor_value

SUM = torch.ops.fxshard.sum_gradient.default
TERM = "fxshard_term"
"""The metadata key of a node that a sum was moved away from: its gradient is this rank's term, not the whole."""


def hoist_sums(gm: fx.GraphModule) -> fx.GraphModule:
    """Move gradient sums towards the graph's inputs.

    Args:
        gm: A local graph.

    Returns:
        ``gm``.
    """
    moved = 1
    while moved:  # a sum over one mesh axis stands in the way of the one over the next
        moved = sum(_hoist(node) for node in reversed(gm.graph.nodes) if node.target is SUM)
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        _merge(placeholder)
    return gm


def _hoist(summed: fx.Node) -> bool:
    """Move a sum as far as it goes; return whether it moved."""
    node = summed
    while made := _hoisted(node):
        node = made
    return node is not summed


def _hoisted(summed: fx.Node) -> fx.Node | None:
    """Move the sums of one value to before the operator that computes it; return the one that they become."""
    computed, group = summed.args
    assert isinstance(computed, fx.Node)
    if not _reads_one_value(computed) or any(u.target is not SUM or u.args[1] != group for u in computed.users):
        return None
    (read,) = computed.all_input_nodes
    if not is_tensor(read) or tensor_value(read).numel() > tensor_value(computed).numel():
        return None  # more would travel
    with computed.graph.inserting_before(computed):
        made = computed.graph.call_function(SUM, (read, group))
    made.meta = {**summed.meta, "val": tensor_value(read)}
    for user in list(computed.users):
        user.replace_all_uses_with(computed)
        computed.graph.erase_node(user)
    computed.replace_input_with(read, made)
    computed.meta[TERM] = True
    return made


def _reads_one_value(node: fx.Node) -> bool:
    is_operator = isinstance(node.target, torch._ops.OpOverload) and not is_communication(node)
    return is_operator and is_tensor(node) and len(node.all_input_nodes) == 1


def _merge(value: fx.Node) -> None:
    first: dict[object, fx.Node] = {}
    for user in sorted(value.users):
        if user.target is SUM:
            kept = first.setdefault(user.args[1], user)
            if kept is not user:
                user.replace_all_uses_with(kept)
                user.graph.erase_node(user)
    for kept in first.values():
        _merge(kept)

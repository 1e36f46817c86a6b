"""Wrap gradients: the backward of a user's ``torch.autograd.Function`` leaves the forward graph.

Before (:mod:`fxshard.ops.custom_gradient`)::       After::

    y = round(x)                                       y = round(x)
    g = fxshard.cotangent(y)                           custom_gradient_0(y, x)     a CustomGradient
    gx = mul(g, 3)                                         backward: gx = mul(g, 3)
    fxshard.custom_gradient([y], [g], [x], [gx])

The backward keeps its own communication, which runs when autograd comes to it: on every rank in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.custom_gradient import CustomGradient
from fxshard.passes.outline import add_module, outline

if TYPE_CHECKING:
    from torch import fx

MARKER = torch.ops.fxshard.custom_gradient.default


def wrap_gradients(gm: fx.GraphModule) -> fx.GraphModule:
    """Move every custom backward of a local graph into a submodule.

    Args:
        gm: A local graph.

    Returns:
        ``gm``, without markers.
    """
    for node in gm.graph.find_nodes(op="call_function", target=MARKER):
        _wrap(gm, node)
    return gm


def _wrap(gm: fx.GraphModule, node: fx.Node) -> None:
    outputs, cotangents, inputs, gradients = (list(a) for a in node.args)  # type: ignore[arg-type]
    body = _backward(node, cotangents, gradients)
    outlined = outline(gm, body, gradients, cotangents)
    name = add_module(gm, "custom_gradient", CustomGradient(outlined.graph_module, len(outputs), len(inputs)))
    with gm.graph.inserting_before(node):
        made = gm.graph.call_module(name, (*outputs, *inputs, *outlined.captured))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)
    for old in reversed(body):
        if not old.users:  # what the forward reads too stays
            gm.graph.erase_node(old)
    for cotangent in cotangents:
        _erase_chain(cotangent)


def _backward(marker: fx.Node, cotangents: list[fx.Node], gradients: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes that compute the gradients, in program order: they stand between the markers."""
    between: list[fx.Node] = []
    node = marker.prev
    while node is not cotangents[0]:
        between.append(node)
        node = node.prev
    needed: set[Any] = set(gradients)
    body = []
    for node in between:  # last first
        if node in needed and node not in cotangents:
            body.append(node)
            needed.update(node.all_input_nodes)
    return body[::-1]


def _erase_chain(node: fx.Node) -> None:
    """Erase a cotangent and the conversions of its output that nobody else reads."""
    while not node.users and node.op != "placeholder":
        (read,) = node.all_input_nodes
        node.graph.erase_node(node)
        node = read

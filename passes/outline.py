"""Outline: nodes of a graph move into a graph of their own.

Before::                          After, with the first two outlined::

    a = f(x); b = g(a, y)         region:  placeholders x, y;  a = f(x); b = g(a, y);  return (b,)
    c = h(b)                      what is left is the caller's to replace: c = h(b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Outlined:
    """A part of a graph.

    Args:
        graph_module: The part, with placeholders for ``given`` and then for ``captured``.
        captured: The nodes outside that it reads, in order.
    """

    graph_module: fx.GraphModule
    captured: tuple[fx.Node, ...]


def outline(
    gm: fx.GraphModule, body: Sequence[fx.Node], results: Sequence[fx.Node], given: Sequence[fx.Node] = ()
) -> Outlined:
    """Return a graph that computes ``results``; ``gm`` is not changed.

    Args:
        gm: Whose nodes they are.
        body: What to copy, in program order; constants (``get_attr``) among them are copied too.
        results: The nodes to return, in or outside of ``body``.
        given: Nodes that become the first placeholders.
    """
    inside, graph = set(body), fx.Graph()
    read = [n for node in body for n in node.all_input_nodes]
    outside = dict.fromkeys(n for n in [*read, *results] if n not in inside and n not in given)
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*given, *outside):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return Outlined(fx.GraphModule(gm, graph), tuple(outside))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module with the same nodes and submodules, to be changed without changing ``gm``."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def add_module(gm: fx.GraphModule, prefix: str, module: fx.GraphModule | object) -> str:
    """Add a submodule under a free name that begins with ``prefix`` and return the name."""
    number = 0
    while hasattr(gm, f"{prefix}_{number}"):
        number += 1
    gm.add_module(f"{prefix}_{number}", module)  # type: ignore[arg-type]  # mypy's module.pyi
    return f"{prefix}_{number}"

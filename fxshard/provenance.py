"""Where a node comes from: the user's line, the module, and for a local node the planned node.

A local graph is emitted in the order of the planned one, and what is emitted for a node has the node's source
location.  So the two are walked side by side, one run of equal locations after the other::

    planned      gelu @ 40    dropout @ 47, conv2d @ 47                 add @ 49
    local        gelu @ 40    all_gather @ 47, dropout @ 47, conv2d @ 47    slice @ 49, add @ 49
                              '------> dropout                              '----> add

Inside a run a local node belongs to the next planned node with its operator, and communication to the node in
front of which it stands.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fxshard.ops.lowering import LOWERINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import fx

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n *(?P<code>.+)', re.MULTILINE)


def source_line(node: fx.Node) -> str:
    """Return the innermost user line of ``node``: ``file:line code``, or nothing where it is not known.

    Args:
        node: Of any graph; the file is relative to where Python found it.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if node.op == "placeholder" or not frames:
        return ""
    frame = frames[-1]
    return f"{_relative(frame['file'])}:{frame['line']} {frame['code']}"


def module_path(node: fx.Node) -> str:
    """Return the module that runs ``node``, as ``named_modules`` names it; nothing where it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    if node.op == "placeholder" or not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"^L\['self'\]\.?", "", path)


def origins(planned: fx.GraphModule, local: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each local node with the planned node that it was emitted for.

    Args:
        planned: A planned graph.
        local: What it was rewritten to; in the same order.
    """
    runs, position = list(_runs(planned.graph.nodes)), 0
    for place, emitted in _runs(n for n in local.graph.nodes if n.op != "output"):
        position = next((i for i in range(position, len(runs)) if runs[i][0] == place), position)
        members = runs[position][1]
        yield from _inputs(members, emitted) if members[0].op == "placeholder" else _matched(members, emitted)


def _runs(nodes: Iterable[fx.Node]) -> Iterator[tuple[Any, list[fx.Node]]]:
    every = list(nodes)  # groupby asks again after the end, and an FX graph's iterator then begins anew
    for place, members in groupby(every, key=lambda n: (n.meta.get("stack_trace"), n.meta.get("seq_nr"))):
        yield place, list(members)


def _inputs(members: Sequence[fx.Node], emitted: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Match the inputs by name, and what is done to one with it."""
    by_name = {str(n.target): n for n in members}
    found: dict[fx.Node, fx.Node] = {}
    for node in emitted:
        found[node] = by_name[str(node.target)] if node.op == "placeholder" else found[node.all_input_nodes[0]]
        yield node, found[node]


def _matched(members: Sequence[fx.Node], emitted: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    at, waiting = 0, []
    for node in emitted:
        waiting.append(node)
        if not is_communication(node):
            at = next((i for i in range(at, len(members)) if members[i].target == node.target), at)
            yield from ((n, members[at]) for n in waiting)
            waiting = []
    yield from ((n, members[at]) for n in waiting)


def is_communication(node: fx.Node) -> bool:
    """Return whether ``node`` calls a communication operator."""
    return node.target in LOWERINGS


def _relative(file: str) -> str:
    folders = [f.rstrip("/") + "/" for f in sys.path if f and file.startswith(f.rstrip("/") + "/")]
    return file.removeprefix(max(folders, key=len, default=""))

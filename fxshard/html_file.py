"""One HTML page of a plan, to look around in: it holds all it needs and asks no network.

The page is ``viewer/page.html`` with its style, its scripts, dagre for the layout and the plan as JSON put in.
What the scripts get is the plan's JSON (``docs/plan.schema.json``) with the tree of calls beside it.
"""

from __future__ import annotations

import dataclasses
import html
import json
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from fxshard.drawing import ORDER_MEANING, Call, Kind, Leaf, calls_in, kind_of_node, readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fxshard.drawing import Box, Drawing

MOST_OPEN = 32
"""A larger model begins folded, open as deep as this allows."""
SCRIPTS = ("tree.js", "place.js", "draw.js", "panel.js", "main.js")
"""In the order in which they need one another."""


def page(drawing: Drawing) -> str:
    """Return the page.

    Args:
        drawing: What to show; the memory is left out where it has none.
    """
    viewer = files("fxshard") / "viewer"
    parts = {name: (viewer / name).read_text() for name in ("page.html", "style.css", "dagre.min.js", *SCRIPTS)}
    plan = json.dumps(_content(drawing), separators=(",", ":")).replace("<", r"\u003c")
    return Template(parts["page.html"]).substitute(
        title=html.escape(drawing.title),
        caption=html.escape(drawing.caption),
        style=parts["style.css"],
        layout_library=parts["dagre.min.js"],
        scripts="\n".join(parts[name] for name in SCRIPTS),
        plan=plan,
    )


def _content(drawing: Drawing) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(drawing.report.to_json())
    opened = readable(drawing.boxes, MOST_OPEN)
    leaves = {leaf.key: (leaf, call) for leaf, call in _leaves(drawing.boxes, None)}
    for node, about in zip(drawing.report.nodes, content["nodes"], strict=True):
        leaf, call = leaves.get(node.name, (None, None))
        about |= {"kind": kind_of_node(node), "label": leaf.label if leaf else node.name, "call": call and call.key}
    parents = {child.key: call.key for call in calls_in(drawing.boxes) for child in call.children}
    content["calls"] = [
        {
            "key": call.key,
            "path": call.path,
            "label": call.label,
            "parent": parents.get(call.key),
            "kind": drawing.kind(call),
            "result": made.name if (made := drawing.result(call)) else None,
            "open": call.key in opened,
        }
        for call in calls_in(drawing.boxes)
    ]
    content["edges"] = drawing.edges
    content["order"] = sorted(drawing.order)
    content["order_meaning"] = ORDER_MEANING
    content["meanings"] = {kind: kind.meaning for kind in Kind}
    content["memory"] = drawing.memory and dataclasses.asdict(drawing.memory)
    return content


def _leaves(boxes: Sequence[Box], call: Call | None) -> Iterator[tuple[Leaf, Call | None]]:
    for box in boxes:
        if isinstance(box, Leaf):
            yield box, call
        else:
            yield from _leaves(box.children, box)

r"""Graph files of a plan: DOT for Graphviz, GraphML for Gephi, yEd and networkx, JSON, and the two pictures.

In DOT a module's call is a cluster and parameters are left out; in the others every node is a vertex, ::

    node    label "conv2d\n1x8x16x64 [S(3; 0,32,64)]"    coloured by layout, double border where something is gathered,
                                                         a hexagon where it only communicates
    edge    from who makes a value to who uses it; dashed in DOT where it only puts random draws into their order
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import networkx as nx

from fxshard.drawing import ORDER_MEANING, Call, Kind, bytes_text, kind_of_node, sizes_text
from fxshard.html_file import page
from fxshard.svg_file import svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fxshard.drawing import Box, Drawing
    from fxshard.report import NodeReport

FILLS = {
    Kind.SPLIT: "#9ecae1",
    Kind.WHOLE: "#eeeeee",
    Kind.GATHERED: "#fdae6b",
    Kind.COMMUNICATION: "#e7b8dd",
    Kind.OTHER: "#ffffff",
}
"""Fill colours."""


def to_networkx(drawing: Drawing) -> nx.DiGraph[str]:
    """Return all nodes, parameters too, as a graph with attributes of plain types."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for node in drawing.report.nodes:
        graph.add_node(node.name, **_attributes(node))
        for source in node.inputs:
            graph.add_edge(source, node.name, bytes=node.sent.of().bytes)
    return graph


def _attributes(node: NodeReport) -> dict[str, str | int | bool]:
    sent = node.sent.of()
    return {
        "op": node.op,
        "kind": str(kind_of_node(node)),
        "is_state": node.is_state,
        "module": node.module,
        "shape": sizes_text(node.shape),
        "local_shape": sizes_text(node.local_shape),
        "layout": node.layout,
        "reason": node.reason,
        "source": node.source,
        "messages": sent.messages,
        "bytes": sent.bytes,
    }


def graphml(drawing: Drawing) -> str:
    """Return the graph as GraphML."""
    written = io.BytesIO()
    nx.write_graphml(to_networkx(drawing), written)
    return written.getvalue().decode()


def json(drawing: Drawing) -> str:
    """Return the report as JSON, as ``docs/plan.schema.json`` says."""
    return drawing.report.to_json()


def dot(drawing: Drawing) -> str:
    """Return the graph in Graphviz' language, with a cluster for each module."""
    label = _quoted(f"{drawing.title}, {drawing.caption}", ORDER_MEANING if drawing.order else "")
    lines = ["digraph plan {", f"  label={label}", "  labelloc=t"]
    lines.append('  node [shape=box, style=filled, fontname="Helvetica"]')
    lines += _boxes(drawing.boxes, "  ")
    dashed = dict.fromkeys(drawing.order, " [style=dashed]")
    lines += [f"  {_quoted(a)} -> {_quoted(b)}{dashed.get((a, b), '')}" for a, b in drawing.edges]
    return "\n".join([*lines, "}"])


def _boxes(boxes: Sequence[Box], margin: str) -> Iterator[str]:
    for box in boxes:
        if isinstance(box, Call):
            yield f"{margin}subgraph {_quoted(f'cluster_{box.key}')} {{"
            yield f"{margin}  label={_quoted(box.label)}"
            yield from _boxes(box.children, f"{margin}  ")
            yield f"{margin}}}"
        else:
            yield margin + _vertex(box.node, box.label)


def _vertex(node: NodeReport, label: str) -> str:
    lines = [label if label == node.name else f"{label} ({node.name})"]
    lines.append(f"{sizes_text(node.shape) or sizes_text(node.local_shape)} {node.layout}".strip())
    for way, part in (("forward", node.sent.forward), ("backward", node.sent.backward)):
        lines += [f"{way} {kind}: {t.messages} {t.noun}, {bytes_text(t.bytes)}" for kind, t in part.items()]
    kind = kind_of_node(node)
    shape = ", shape=hexagon" if kind is Kind.COMMUNICATION else ""
    borders = ", peripheries=2" if node.reason else ""
    return f"{_quoted(node.name)} [label={_quoted(*lines)}, fillcolor={_quoted(FILLS[kind])}{shape}{borders}]"


def _quoted(*lines: str) -> str:
    return '"' + r"\n".join(line.replace("\\", r"\\").replace('"', r"\"") for line in lines if line) + '"'


WRITERS: dict[str, Callable[[Drawing], str]] = {
    ".json": json,
    ".dot": dot,
    ".graphml": graphml,
    ".svg": svg,
    ".html": page,
}
"""By file ending."""
WITH_MEMORY = (".svg", ".html")
"""What shows the memory, which takes seconds to predict."""

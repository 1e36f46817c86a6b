r"""Graph files of a plan: DOT for Graphviz, GraphML for Gephi, yEd and networkx.

One vertex for each node of the global graph, one edge for each value, ::

    node    label "conv2d\n1x8x16x64 [S(3; 0,32,64)]"    coloured by layout, double border where something is gathered
    edge    from who makes a value to who uses it
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from fxshard.report import NodeReport, PlanReport

SPLIT, WHOLE, GATHERED = "#9ecae1", "#eeeeee", "#fdae6b"
"""Fill colours."""


def to_networkx(report: PlanReport, planned: fx.GraphModule) -> nx.DiGraph[str]:
    """Return the plan as a graph with attributes of plain types.

    Args:
        report: Of the plan.
        planned: Its global graph.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    reports = {node.name: node for node in report.nodes}
    for node in planned.graph.nodes:
        graph.add_node(node.name, **_attributes(reports[node.name]))
        sent = reports[node.name].sent.of().bytes
        for source in node.all_input_nodes:
            graph.add_edge(source.name, node.name, bytes=sent)
    return graph


def _attributes(node: NodeReport) -> dict[str, str | int]:
    sent = node.sent.of()
    return {
        "op": node.op,
        "module": node.module,
        "shape": "x".join(map(str, node.shape or ())),
        "local_shape": "x".join(map(str, node.local_shape or ())),
        "layout": node.layout,
        "reason": node.reason,
        "source": node.source,
        "messages": sent.messages,
        "bytes": sent.bytes,
    }


def graphml(report: PlanReport, planned: fx.GraphModule) -> str:
    """Return the plan as GraphML; arguments as :func:`to_networkx`'s."""
    written = io.BytesIO()
    nx.write_graphml(to_networkx(report, planned), written)
    return written.getvalue().decode()


def dot(report: PlanReport, planned: fx.GraphModule) -> str:
    """Return the plan in Graphviz' language; arguments as :func:`to_networkx`'s."""
    graph = to_networkx(report, planned)
    lines = ["digraph plan {", '  node [shape=box, style=filled, fontname="Helvetica"]']
    for name, about in graph.nodes.items():
        label = rf"{name}\n{about['shape']} {about['layout']}"
        if about["bytes"]:
            label += rf"\n{about['messages']} messages, {about['bytes']:,} bytes"
        borders = ", peripheries=2" if about["reason"] else ""
        lines.append(f"  {_quoted(name)} [label={_quoted(label)}, fillcolor={_quoted(_colour(about))}{borders}]")
    lines += [f"  {_quoted(a)} -> {_quoted(b)}" for a, b in graph.edges]
    return "\n".join([*lines, "}"])


def _colour(about: dict[str, str | int]) -> str:
    if about["reason"]:
        return GATHERED
    return SPLIT if "S(" in str(about["layout"]) else WHOLE


def _quoted(text: str) -> str:
    escaped = text.replace('"', r"\"")
    return f'"{escaped}"'


WRITERS: dict[str, Callable[[PlanReport, fx.GraphModule], str]] = {".dot": dot, ".graphml": graphml}
"""By file ending."""

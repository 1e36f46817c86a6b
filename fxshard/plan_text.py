"""The texts of a plan: the table of its stages, and what is said about a node."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from fxshard.drawing import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.report import Estimate, NodeReport, PlanReport

MOST_BOUNDS = 9
"""How many bounds of a split a table shows."""
MOST_STAGES = 24
"""How many rows a summary has at most; deeper modules are folded into their parents until it fits."""
OUTPUT = "(output)"
HEAD = ("stage", "last map", "layout", "halos", "halo bytes", "reduced", "gathers")


def summary(report: PlanReport) -> list[str]:
    """Return the lines of a page: one row for each stage of the model, totals, and why something is gathered."""
    ranks, mesh = math.prod(report.mesh_shape), " x ".join(map(str, report.mesh_shape))
    lines = [f"{ranks} ranks, mesh {mesh}; what rank {report.coords} holds and sends in a step", ""]
    lines += table([HEAD, *(stage_row(name, nodes) for name, nodes in stages(report).items())])
    lines += ["", "in all"]
    for way, part in (("forward", report.total.forward), ("backward", report.total.backward)):
        lines += [
            f"  {way:<9} {kind:<13}{sent.messages:>6} {sent.noun:<8} {size_or_dash(sent.bytes):>11}"
            for kind, sent in part.items()
        ]
    return [*lines, "", *_gathers(report)]


def _gathers(report: PlanReport) -> list[str]:
    if not report.reasons:
        return ["nothing is gathered for want of a rule"]
    return ["gathered, or not split", *(f"  {count:>4} x {reason}" for reason, count in report.reasons.items())]


def stages(report: PlanReport) -> dict[str, tuple[NodeReport, ...]]:
    """Return the nodes by module path, cut to the depth at which a summary fits a page; last, gathered outputs."""
    paths = [node.module.split(".") if node.module else [] for node in report.nodes]
    for depth in range(max(map(len, paths), default=0), -1, -1):
        found: defaultdict[str, list[NodeReport]] = defaultdict(list)
        for node, path in zip(report.nodes, paths, strict=True):
            if node.op not in ("placeholder", "output") and node.shape is not None:
                found[".".join(path[:depth])].append(node)
        if len(found) <= MOST_STAGES:
            break
    outputs = tuple(node for node in report.nodes if node.op == "output" and node.sent.of().messages)
    return {name: tuple(nodes) for name, nodes in found.items()} | ({OUTPUT: outputs} if outputs else {})


def stage_row(name: str, nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    """Return the row of a stage, under :data:`HEAD`."""
    last, sent = nodes[-1], [n.sent for n in nodes]
    halos = [s.of("halo") for s in sent]
    reduced = sum(s.of("reduce", "gradient").bytes for s in sent)
    gathered = sum(s.of("gather", "redistribute").bytes for s in sent)
    return (
        name or "(model)",
        "x".join(map(str, last.shape or ())),
        _shortened(last.layout),
        str(sum(h.messages for h in halos)),
        size_or_dash(sum(h.bytes for h in halos)),
        size_or_dash(reduced),
        size_or_dash(gathered),
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose last four columns are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = len(widths) - 4  # the last four columns
    return [
        "  ".join(c.rjust(w) if i >= numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def size_or_dash(count: int) -> str:
    """Return a number of bytes as text."""
    return bytes_text(count) if count else "-"


def place_of(node: NodeReport | None) -> str:
    """Return where the value of a node lives, and why."""
    if node is None:
        return "not there"
    layout = node.layout if "(" in node.layout else "whole"
    return f"{layout} ({node.reason})" if node.reason else layout


def explained(nodes: Sequence[NodeReport]) -> list[str]:
    """Return what is done for each of some nodes, over some lines; a line of the model's stands at its first node."""
    sources = ["", *(node.source for node in nodes)]
    return [
        line
        for node, before in zip(nodes, sources, strict=False)
        for line in _explained(node, names_source=node.source != before)
    ]


def _explained(node: NodeReport, *, names_source: bool) -> list[str]:
    shape = "x".join(map(str, node.shape)) if node.shape is not None else ""
    local = "x".join(map(str, node.local_shape)) if node.local_shape is not None else ""
    lines = [f"{node.name}: {node.op} {shape} {node.layout}" + (f", here {local}" if local != shape else "")]
    if node.source and names_source:
        lines.append(f"    at {node.source}")
    for way, part in (("forward", node.sent.forward), ("backward", node.sent.backward)):
        lines += [f"    {way} {kind}: {t.messages} {t.noun}, {t.bytes:,} bytes" for kind, t in part.items()]
    if node.reason:
        lines.append(f"    {'not split' if node.op == 'placeholder' else 'gathered'}: {node.reason}")
    return [*lines, *_times(node.estimate)]


def _times(estimate: Estimate | None) -> list[str]:
    """Return what is said of a node's time: nothing of a view's, which has none and sends nothing."""
    if estimate is None or not any((estimate.here_us, estimate.whole_us, estimate.otherwise_us)):
        return []
    if estimate.split_us is None or estimate.whole_us is None:
        return [f"    estimated: {estimate.here_us:.1f} us"]
    gather = "" if estimate.gather_us is None else f"; to gather its value {estimate.gather_us:.1f} us"
    lines = [f"    estimated: split {estimate.split_us:.1f} us, whole {estimate.whole_us:.1f} us{gather}"]
    if estimate.otherwise_us is not None:
        other = "whole" if estimate.is_split else "split"
        others = f", and with it {estimate.with_it} more" if estimate.with_it else ""
        longer = f"a step would take {estimate.otherwise_us:.1f} us more, gathers included"
        lines.append(f"    if it were {other}{others}: {longer}")
    return lines


def _shortened(layout: str) -> str:
    """Return a layout with its long lists of bounds cut.

    Example:
        >>> _shortened("[S(3; 0,2,4,6,8,10,12,14,16,18,20)]")
        '[S(3; 0,2,4,6,...,20)]'
    """

    def cut(found: re.Match[str]) -> str:
        bounds = found[0].split(",")
        return found[0] if len(bounds) <= MOST_BOUNDS else ",".join([*bounds[:4], "...", bounds[-1]])

    return re.sub(r"\d+(,\d+)+", cut, layout)

"""An SVG picture of a plan: modules in program order, what they send, and the memory beside them.

It is one page of valid XML without scripts; dark where the reader's system is.  Colour says nothing alone: a split
value has a sign of bars, a whole one of a filled square, a gathered one of arrows, and each is named.  Where things are
is :mod:`fxshard.svg_rows`' matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from fxshard.drawing import (
    ORDER_MEANING,
    Call,
    Drawing,
    Kind,
    bytes_text,
    kind_of_node,
    readable,
    sent_by,
    sizes_text,
)
from fxshard.memory import size_text
from fxshard.svg_rows import LINE, Rows, memory_line, place
from fxshard.svg_style import STYLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.drawing import Box
    from fxshard.memory import Memory
    from fxshard.ops.traffic import Traffic
    from fxshard.svg_rows import Frame, Row

MOST_ROWS = 48
"""A larger model is drawn module by module, open as deep as this allows."""
TOP, FOOT, MARGIN = 160, 64, 28
LANE, INDENT, BOXES = 14, 12, 360
"""The distance of lanes and of nested modules, and the width of the column of boxes."""
COLUMNS = {"value": 200, "forward": 196, "backward": 216}
CHART = 250


def svg(drawing: Drawing) -> str:
    """Return the picture.

    Args:
        drawing: What to draw; the memory is left out where it has none.
    """
    opened = readable(drawing.boxes, MOST_ROWS)
    rows = place(drawing, opened, TOP)
    skips = rows.skips()
    left = MARGIN + LANE * (max((skip.lane for skip in skips), default=-1) + 2)
    page = _Page(drawing, rows, left)
    page.heading()
    for frame in rows.frames:
        page.frame(frame)
    page.edges()
    for row in rows.rows:
        page.row(row)
    if drawing.memory is not None:
        page.chart(drawing.memory)
    indent(page.root, " ")
    return tostring(page.root, encoding="unicode")


class _Page:
    """The picture while it is drawn.

    Args:
        drawing: What is drawn.
        rows: Where things are.
        left: Where the boxes begin.
    """

    def __init__(self, drawing: Drawing, rows: Rows, left: int) -> None:
        self.drawing = drawing
        self.rows, self.left, self.right = rows, left, left + BOXES
        self.columns, x = {}, self.right + 24
        for name, width in COLUMNS.items():
            self.columns[name] = x
            x += width
        self.chart_left = x
        width, height = x + (CHART if drawing.memory else 0) + MARGIN, rows.bottom + FOOT
        box = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
        names = {"role": "img", "aria-labelledby": "title about", "xmlns": "http://www.w3.org/2000/svg"}
        self.root = Element("svg", {**names, **box})
        self.width = width

    def add(self, tag: str, parent: Element | None = None, text: str = "", **attributes: object) -> Element:
        """Add an element; ``cls`` is its class."""
        named = {k.replace("cls", "class").replace("_", "-"): _number(v) for k, v in attributes.items()}
        element = SubElement(self.root if parent is None else parent, tag, named)
        element.text = text or None
        return element

    def heading(self) -> None:
        """Add the title, the legend and the names of the columns."""
        drawing = self.drawing
        self.add("title", text=drawing.title, id="title")
        self.add("desc", text=f"{drawing.caption}; one row for each module or node, in program order", id="about")
        self.add("style", text=STYLE)
        self.add("rect", cls="page", width=self.width, height=self.rows.bottom + FOOT)
        self.add("text", text=drawing.title, cls="title", x=MARGIN, y=44)
        self.add("text", text=f"{drawing.caption} · {_totals(drawing)}", cls="quiet", x=MARGIN, y=66)
        self._legend()
        names = {"value": "value", "forward": "sent forward", "backward": "sent backward"}
        self.add("text", text="program", cls="column", x=self.left, y=TOP - 18)
        for column, x in self.columns.items():
            self.add("text", text=names[column], cls="column", x=x, y=TOP - 18)
        self.add("path", cls="rule", d=f"M{MARGIN} {TOP - 9}H{self.width - MARGIN}")

    def _legend(self) -> None:
        x = MARGIN
        for kind in Kind:
            self.sign(self.root, kind, x, 83)
            self.add("text", text=kind.meaning, cls="small", x=x + 24, y=95)
            x += 24 + round(5.9 * len(kind.meaning)) + 22
        if self.drawing.order:
            self.add("path", self.add("g", cls="edges"), cls="edge order", d=f"M{MARGIN} 110H{MARGIN + 16}")
            self.add("text", text=ORDER_MEANING, cls="small", x=MARGIN + 24, y=114)

    def sign(self, parent: Element, kind: Kind, x: int, y: int) -> None:
        """Add the sign of a kind, 16 by 16."""
        group = self.add("g", parent, cls=f"sign {kind}", transform=f"translate({x} {y})", aria_hidden="true")
        self.add("path", group, cls="body", d=_SIGNS[kind])
        self.add("rect", group, cls="edge", width=16, height=16, rx=3)

    def frame(self, frame: Frame) -> None:
        """Add an open module."""
        x = self.left + INDENT * frame.depth
        width, height = self._right(frame.depth) - x, frame.bottom - frame.top
        group = self.add("g", cls="module", data_path=frame.call.path)
        self.add("title", group, text=frame.call.path)
        self.add("rect", group, rx=9, x=x, y=frame.top, width=width, height=height)
        self.add("text", group, text=frame.call.label, cls="name", x=x + 12, y=frame.top + 18)

    def row(self, row: Row) -> None:
        """Add a box and what is said of it."""
        x, kind = self.left + INDENT * row.depth, self.drawing.kind(row.box)
        group = self.add("g", cls=f"row {kind}", data_key=row.box.key)
        self.add("title", group, text=_tip(row.box))
        stacked = isinstance(row.box, Call)
        if stacked:
            self._rect(group, x + 4, row.top + 4, self._right(row.depth) + 4, row.height)
        self._rect(group, x, row.top, self._right(row.depth), row.height)
        self.sign(group, kind, x + 12, round(row.middle) - 8)
        label = self.add("text", group, cls="name", x=x + 40, y=row.middle + 5, text=_cut(row.box.label, 26))
        self.add("tspan", label, cls="quiet", dx=8, text=_cut(_contents(row.box), 40 - min(len(row.box.label), 26)))
        self._value(group, row)
        sent = sent_by(row.box)
        self._sent(group, row, "forward", sent.forward)
        self._sent(group, row, "backward", sent.backward)

    def _rect(self, group: Element, x: int, top: int, right: int, height: int) -> None:
        self.add("rect", group, cls="box", x=x, y=top, width=right - x, height=height, rx=7)

    def _right(self, depth: int) -> int:
        return self.right - INDENT * depth

    def _value(self, group: Element, row: Row) -> None:
        node = self.drawing.result(row.box)
        if node is None or node.local_shape is None:
            return
        x, here = self.columns["value"], sizes_text(node.local_shape)
        whole = sizes_text(node.shape) or here
        kind = kind_of_node(node)
        note = f"{kind}, here {here}" if here != whole else str(kind) if kind is not Kind.OTHER else "here"
        self.add("text", group, cls="number", x=x, y=row.middle - 3, text=whole)
        self.add("text", group, cls="small", x=x, y=row.middle + 12, text=note)

    def _sent(self, group: Element, row: Row, column: str, sent: dict[str, Traffic]) -> None:
        y = row.middle + 4 - LINE * (len(sent) - 1) / 2
        for i, (kind, traffic) in enumerate(sent.items()):
            x = self.columns[column]
            line = self.add("text", group, cls=f"sent {kind}", x=x, y=y + LINE * i)
            self.add("tspan", line, cls="arrow", text="⇄ " if kind == "halo" else "⊕ " if kind in _SUMS else "⇶ ")
            self.add("tspan", line, cls="kind", text=kind)
            self.add("tspan", line, cls="number", dx=6, text=f"{_messages(traffic)}, {bytes_text(traffic.bytes)}")

    def edges(self) -> None:
        """Add who reads whom: straight to the next row, in lanes past others."""
        group, rows = self.add("g", cls="edges", aria_hidden="true"), self.rows.rows
        x = self.left + BOXES / 2
        for source, reader in sorted(self.rows.edges):
            if reader == source + 1:
                path, tip = f"M{x} {rows[source].bottom}V{rows[reader].top}", f"{x} {rows[reader].top}"
                self._arrow(group, path, tip, 90, is_order=(source, reader) in self.rows.order)
        for skip in self.rows.skips():
            for reader in skip.readers:
                lane = self.left - LANE * (skip.lane + 1)
                self._skip(group, lane, rows[skip.source], rows[reader], is_order=skip.is_order)

    def _skip(self, group: Element, lane: int, source: Row, reader: Row, *, is_order: bool) -> None:
        start, end = source.middle + 6, reader.middle - 6
        left, inside = self.left + INDENT * source.depth, self.left + INDENT * reader.depth
        down = f"Q{lane} {start} {lane} {start + 6}V{end - 6}Q{lane} {end} {lane + 6} {end}"
        self._arrow(group, f"M{left} {start}H{lane + 6}{down}H{inside}", f"{inside} {end}", 0, is_order=is_order)

    def _arrow(self, group: Element, path: str, tip: str, turn: int, *, is_order: bool) -> None:
        self.add("path", group, cls="edge order" if is_order else "edge", d=path)
        self.add("path", group, cls="tip", d="M0 0L-7 -3.5V3.5Z", transform=f"translate({tip}) rotate({turn})")

    def chart(self, memory: Memory) -> None:
        """Add the memory, each moment at the row of its module."""
        peak, x = memory.peak, self.chart_left
        group = self.add("g", cls="memory", role="img", aria_label=f"memory, at most {size_text(peak.bytes)}")
        self.add("text", group, text="memory", cls="column", x=x, y=TOP - 18)
        self.add("text", group, text=f"peak {size_text(peak.bytes)}", cls="small", x=x + 62, y=TOP - 18)
        bottom = self.rows.rows[-1].bottom
        for share in (0, 0.5, 1):
            at = x + CHART * share
            self.add("path", group, cls="rule", d=f"M{at} {TOP}V{bottom}")
            text = size_text(round(peak.bytes * share)) if share else "0"
            anchor = "end" if share == 1 else "middle" if share else "start"
            self.add("text", group, text=text, cls="small", x=at, y=bottom + 16, text_anchor=anchor)
        self.add("text", group, text="solid: the forward, downwards", cls="small", x=x, y=bottom + 36)
        self.add("text", group, text="dashed: the backward, upwards", cls="small", x=x, y=bottom + 52)
        for phase in ("forward", "backward"):
            moments = [m for m in memory.timeline if m.phase == phase]
            points = memory_line(self.rows, moments, upwards=phase == "backward")
            if points:
                self._curve(group, phase, [(x + CHART * count / peak.bytes, y) for y, count in points])

    def _curve(self, group: Element, phase: str, points: Sequence[tuple[float, float]]) -> None:
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        if phase == "forward":
            first, last = points[0][1], points[-1][1]
            area = f"{self.chart_left},{first:.1f} {line} {self.chart_left},{last:.1f}"
            self.add("polygon", group, cls="area", points=area)
        self.add("polyline", group, cls=f"curve {phase}", points=line)


_SUMS = ("reduce", "gradient")
_SIGNS = {
    Kind.SPLIT: "M3 3H5V13H3ZM7 3H9V13H7ZM11 3H13V13H11Z",
    Kind.WHOLE: "M3 3H13V13H3Z",
    Kind.GATHERED: "M2 8L6 4V7H7V9H6V12ZM14 8L10 4V7H9V9H10V12Z",
    Kind.COMMUNICATION: "M2 6L5 3V5H14V7H5V9ZM14 10L11 7V9H2V11H11V13Z",
    Kind.OTHER: "M6 8A2 2 0 0 1 10 8A2 2 0 0 1 6 8Z",
}


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _messages(traffic: Traffic) -> str:
    return f"{traffic.messages} msg" if traffic.messages else "in a bucket"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _contents(box: Box) -> str:
    if isinstance(box, Call):
        return f"{len(box.nodes)} nodes"
    operator = box.node.op.split(".")[1] if "." in box.node.op else ""
    return operator if operator != box.label else ""


def _totals(drawing: Drawing) -> str:
    parts = {"forward": drawing.report.total.forward, "backward": drawing.report.total.backward}
    sums = {way: sum(t.bytes for t in sent.values()) for way, sent in parts.items()}
    return ", ".join(f"{bytes_text(count)} sent {way}" for way, count in sums.items())


def _tip(box: Box) -> str:
    node = box.nodes[-1]
    lines = [box.path if isinstance(box, Call) else f"{node.name}: {node.op}", node.layout, node.source]
    lines += dict.fromkeys(n.reason for n in box.nodes)
    return "\n".join(line for line in lines if line)

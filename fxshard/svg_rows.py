"""Where things are in an SVG picture of a plan: rows in program order, modules around them, lanes for what skips rows.

    lanes     boxes                                                  a row for each box, so that everything else
              .- stages.0 -------------.                             that has program order lines up with it
       .------|-[ blocks.0           ]-|   values   sent   memory
       |      | [ blocks.1           ] |
       |      '------------------------'
       '------->[ decoder            ]

The boxes that are seen make a graph (:func:`networkx.quotient_graph` in effect); an edge to the next row is drawn
straight, the others run in lanes beside the rows.  Two that overlap need different lanes: a colouring.  What only puts
random draws into their order has lanes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import networkx as nx

from fxshard.drawing import Box, Call, Drawing, sent_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fxshard.memory import Moment

HEADER, PAD, GAP = 26, 10, 8
"""Of a module: the height of its title, what is free below its rows, and what is free between rows."""
LINE, ROW = 16, 42
"""The height of a line of text, and the least of a row."""


@dataclass(frozen=True)
class Row:
    """A box that is seen.

    Args:
        box: What is drawn.
        depth: How many modules are around it.
        top: Where it begins.
        height: How high it is.
    """

    box: Box
    depth: int
    top: int
    height: int

    @property
    def middle(self) -> float:
        """Half way down."""
        return self.top + self.height / 2

    @property
    def bottom(self) -> int:
        """Where it ends."""
        return self.top + self.height


@dataclass(frozen=True)
class Frame:
    """An open module.

    Args:
        call: Which.
        depth: How many modules are around it.
        top: Where it begins.
        bottom: Where it ends.
    """

    call: Call
    depth: int
    top: int
    bottom: int


@dataclass(frozen=True)
class Skip:
    """A value that is read further down than in the next row.

    Args:
        source: The index of the row that makes it.
        readers: Those of the rows that read it.
        lane: In which it runs; 0 is next to the boxes.
        is_order: Whether it is no value, but the order of random draws.
    """

    source: int
    readers: tuple[int, ...]
    lane: int
    is_order: bool = False


@dataclass(frozen=True)
class Rows:
    """Everything that has a place.

    Args:
        rows: In program order.
        frames: Open modules, each before those in it.
        edges: Who reads whom, by the indices of rows.
        order: Those of the edges that only put random draws into their order.
        bottom: Where the last ends.
    """

    rows: tuple[Row, ...]
    frames: tuple[Frame, ...]
    edges: frozenset[tuple[int, int]]
    order: frozenset[tuple[int, int]]
    bottom: int

    def skips(self) -> tuple[Skip, ...]:
        """Return the values that skip rows; those that overlap are in different lanes, short ones next to the boxes."""
        readers: dict[tuple[int, bool], list[int]] = {}
        for source, reader in sorted(self.edges):
            if reader > source + 1:
                readers.setdefault((source, (source, reader) in self.order), []).append(reader)
        spans = {skip: (skip[0], found[-1]) for skip, found in readers.items()}
        overlaps: nx.Graph[tuple[int, bool]] = nx.Graph()
        overlaps.add_nodes_from(spans)
        overlaps.add_edges_from(
            (a, b)
            for a in spans
            for b in spans
            if a < b and max(spans[a][0], spans[b][0]) <= min(spans[a][1], spans[b][1])
        )
        lanes = nx.greedy_color(overlaps, strategy=lambda *_: sorted(spans, key=lambda s: spans[s][1] - spans[s][0]))
        return tuple(Skip(skip[0], tuple(found), lanes[skip], skip[1]) for skip, found in readers.items())


def place(drawing: Drawing, opened: frozenset[str], top: int) -> Rows:
    """Return where things are, from ``top`` on, when the calls with the keys ``opened`` are open."""
    rows: list[Row] = []
    frames: list[Frame] = []

    def put(inside: Iterable[Box], depth: int, y: int) -> int:
        for box in inside:
            if isinstance(box, Call) and box.key in opened:
                at = len(frames)
                end = put(box.children, depth + 1, y + HEADER) - GAP + PAD
                frames.insert(at, Frame(box, depth, y, end))
            else:
                end = y + _height(box)
                rows.append(Row(box, depth, y, end - y))
            y = end + GAP
        return y

    bottom = put(drawing.boxes, 0, top)
    row_of = {node.name: i for i, row in enumerate(rows) for node in row.box.nodes}
    pairs = {edge: (row_of[edge[0]], row_of[edge[1]]) for edge in drawing.edges}
    edges = frozenset((a, b) for a, b in pairs.values() if a < b)
    values = frozenset(pair for edge, pair in pairs.items() if edge not in drawing.order)
    return Rows(tuple(rows), tuple(frames), edges, edges - values, bottom)


def _height(box: Box) -> int:
    sent = sent_by(box)
    return max(ROW, 10 + LINE * max(len(sent.forward), len(sent.backward)))


def memory_line(rows: Rows, moments: Iterable[Moment], *, upwards: bool) -> list[tuple[float, int]]:
    """Return the memory as points ``(y, bytes)``: the forward goes down the rows, the backward up again.

    A moment is in a row that has nodes of its module, the nearest to the row of the moment before it; one whose module
    is not known stays in that row.
    """
    order = list(reversed(rows.rows)) if upwards else list(rows.rows)
    rows_of: dict[str, set[int]] = {}
    for i, row in enumerate(order):
        for node in row.box.nodes:
            rows_of.setdefault(node.module, set()).add(i)
    members: list[list[int]] = [[] for _ in order]
    at = 0
    for moment in moments:
        known = rows_of.get(moment.module, ()) if moment.module else ()
        at = min(known, key=partial(_distance, at), default=at)
        members[at].append(moment.bytes)
    return [point for row, found in zip(order, members, strict=True) for point in _spread(row, found, upwards=upwards)]


def _distance(a: int, b: int) -> int:
    return abs(a - b)


def _spread(row: Row, found: list[int], *, upwards: bool) -> Iterator[tuple[float, int]]:
    for i, count in enumerate(found):
        share = (i + 0.5) / len(found)
        yield row.top + row.height * (1 - share if upwards else share), count

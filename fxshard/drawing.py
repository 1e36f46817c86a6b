"""What is drawn of a plan: its nodes in the modules that run them, and where their values live.

A module is one box for each *call*: a run of nodes in program order.  So what is folded stays in order, and a module
that is called twice is there twice::

    stages.0                 a box that only holds another is named with it: "stages.0"
      blocks.0
        conv_dw              a module with one node is that node
        mul, add             nodes of the block's own forward
      blocks.0 (call 2)
      90 x clone             many alike in a row are one box

Parameters and buffers are not drawn: they would be most of the vertices.  JSON and GraphML have them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from fxshard.report import Communication

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fxshard.memory import Memory
    from fxshard.report import NodeReport, PlanReport


class Kind(StrEnum):
    """How a box is drawn."""

    SPLIT = "split"
    WHOLE = "whole"
    GATHERED = "gathered"
    COMMUNICATION = "communication"
    OTHER = "other"

    @property
    def meaning(self) -> str:
        """One line for a legend."""
        return _MEANINGS[self]


_MEANINGS = {
    Kind.SPLIT: "split: each rank has a part",
    Kind.WHOLE: "whole on every rank",
    Kind.GATHERED: "gathered, or not split, for a reason",
    Kind.COMMUNICATION: "communication",
    Kind.OTHER: "part of a value, or no tensor",
}
ORDER_MEANING = "dashed: the order of random draws, no value"
"""One line for a legend, of the edges of :attr:`Drawing.order`."""
RANDOM, TOKEN = "fxshard.random.default", ("int8", (0,))
"""The operator that draws, and what it hands to the next draw beside its value (:mod:`fxshard.ops.random`)."""
ALIKE = 5
"""So many nodes in a row that call the same operator are one box."""


@dataclass(frozen=True)
class Leaf:
    """A node.

    Args:
        node: What is known of it.
        label: Its operator, or the module that it is all of.
    """

    node: NodeReport
    label: str

    @property
    def key(self) -> str:
        """Its name in the graph."""
        return self.node.name

    @property
    def nodes(self) -> tuple[NodeReport, ...]:
        """The node."""
        return (self.node,)


@dataclass(frozen=True)
class Call:
    """One call of a module, or many nodes that are alike.

    Args:
        key: Its path, with the number of the call from the second on: ``"relu#2"``.
        path: As ``named_modules`` has it.
        label: The end of the path, and which call.
        children: In program order.
    """

    key: str
    path: str
    label: str
    children: tuple[Box, ...]

    @property
    def depth(self) -> int:
        """How many names its path has."""
        return self.path.count(".") + 1

    @property
    def is_flat(self) -> bool:
        """Whether it calls no other module."""
        return all(isinstance(child, Leaf) for child in self.children)

    @cached_property
    def nodes(self) -> tuple[NodeReport, ...]:
        """All nodes in it, in program order."""
        return tuple(node for child in self.children for node in child.nodes)


Box: TypeAlias = Leaf | Call


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Args:
        report: A plan, or its local graph.
        memory: What the rank keeps, where it is drawn too.
        title: Of the picture.
    """

    report: PlanReport
    memory: Memory | None = None
    title: str = "fxshard plan"

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The outermost boxes, in program order."""
        placed = [(tuple(n.module.split(".")) if n.module else (), n) for n in self.report.nodes if not n.is_state]
        return _nested(placed, 0, Counter())

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Who makes a value and who reads it, by name; without what copies buffers in and out of the graph."""
        updates, aside = set(self.report.updates), self._state_and_copies
        return tuple(
            (source, node.name)
            for node in self.report.nodes
            for source in node.inputs
            if source not in aside and node.name not in aside and not (node.op == "output" and source in updates)
        )

    @cached_property
    def order(self) -> frozenset[tuple[str, str]]:
        """Those of the edges that put random draws into their order, and carry no value."""
        drawn = {node.name for node in self.report.nodes if node.op == RANDOM}
        made = (n for n in self.report.nodes if n.op == "getitem" and drawn.issuperset(n.inputs))
        tokens = {n.name for n in made if (n.dtype, n.local_shape) == TOKEN}
        return frozenset(edge for edge in self.edges if not tokens.isdisjoint(edge))

    @cached_property
    def _state_and_copies(self) -> set[str]:
        """Return parameters and buffers, their copies where a local graph begins, and what writes them at its end."""
        state = {node.name for node in self.report.nodes if node.is_state}
        copies = {n.name for n in self.report.nodes if operator_name(n) == "clone" and state.issuperset(n.inputs)}
        writes = [n for n in self.report.nodes if operator_name(n) == "copy_" and n.inputs and n.inputs[0] in state]
        written = {n.name for n in writes} | {name for n in writes for name in n.inputs if name.startswith("detach")}
        return state | copies | written

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for source, reader in self.edges:
            if (source, reader) not in self.order:
                found.setdefault(source, []).append(reader)
        return found

    def result(self, box: Box) -> NodeReport | None:
        """Return the node whose value a box hands on: the last that is read outside; None where there is none."""
        if isinstance(box, Leaf):
            return box.node
        inside = {node.name for node in box.nodes}
        made = (n for n in reversed(box.nodes) if any(r not in inside for r in self._readers.get(n.name, ())))
        return next(made, None)

    def kind(self, box: Box) -> Kind:
        """Return how a box is drawn: gathered where something in it is, else as the value lives that it hands on."""
        if isinstance(box, Call) and any(node.reason for node in box.nodes):
            return Kind.GATHERED
        made = self.result(box)
        return Kind.OTHER if made is None else kind_of_node(made)

    @cached_property
    def caption(self) -> str:
        """One line on the mesh and the rank."""
        mesh, coords = (" x ".join(map(str, numbers)) for numbers in (self.report.mesh_shape, self.report.coords))
        graph = "global graph" if self.report.stage == "global" else "the rank's own graph"
        return f"mesh {mesh}, rank {coords}, {graph}"


Placed: TypeAlias = tuple[tuple[str, ...], "NodeReport"]


def _nested(placed: Sequence[Placed], depth: int, calls: Counter[str]) -> tuple[Box, ...]:
    """Return the boxes of nodes whose first ``depth`` names are the same."""
    found: list[Box] = []
    for name, run in groupby(placed, lambda item: ".".join(item[0][: depth + 1]) if len(item[0]) > depth else None):
        items = list(run)
        if name is None:
            found += _alike_folded([Leaf(node, operator_name(node)) for _, node in items], items[0][0])
            continue
        calls[name] += 1
        part, again = items[0][0][depth], calls[name] > 1
        label = f"{part} (call {calls[name]})" if again else part
        key = f"{name}#{calls[name]}" if again else name
        found.append(_unless_alone(Call(key, name, label, _nested(items, depth + 1, calls))))
    return tuple(found)


def _alike_folded(leaves: Sequence[Leaf], path: tuple[str, ...]) -> Iterator[Box]:
    for operator, run in groupby(leaves, lambda leaf: leaf.label):
        alike = tuple(run)
        if len(alike) < ALIKE:
            yield from alike
        else:
            label = f"{len(alike)} x {operator}"
            yield Call(f"{alike[0].key}...", ".".join((*path, operator)), label, alike)


def _unless_alone(call: Call) -> Box:
    """Return a call, or what it holds alone under both names."""
    if len(call.children) > 1:
        return call
    (only,) = call.children
    if isinstance(only, Call):
        return Call(only.key, only.path, f"{call.label}.{only.label}", only.children)
    is_own = only.label == operator_name(only.node)
    return Leaf(only.node, call.label if is_own else f"{call.label}.{only.label}")


def operator_name(node: NodeReport) -> str:
    """Return ``"conv2d"`` of ``"aten.conv2d.default"``; an input or the output is called so."""
    if node.op == "placeholder":
        return "input"
    parts = node.op.split(".")
    return parts[1] if len(parts) > 1 else node.op


def kind_of_node(node: NodeReport) -> Kind:
    """Return how a node is drawn."""
    if node.op.startswith("fxshard.") and (node.sent.forward or node.sent.backward):
        return Kind.COMMUNICATION
    if node.reason:
        return Kind.GATHERED
    if not node.layout:
        return Kind.OTHER
    return Kind.SPLIT if "S(" in node.layout else Kind.WHOLE


def sent_by(box: Box) -> Communication:
    """Return what is sent for all nodes in a box."""
    return sum((node.sent for node in box.nodes), Communication())


def calls_in(boxes: Iterable[Box]) -> Iterator[Call]:
    """Yield all calls, each before those in it."""
    for box in boxes:
        if isinstance(box, Call):
            yield box
            yield from calls_in(box.children)


def folded(boxes: Iterable[Box], opened: frozenset[str]) -> Iterator[Box]:
    """Yield the boxes that are seen when the calls with these keys are open, in program order."""
    for box in boxes:
        if isinstance(box, Call) and box.key in opened:
            yield from folded(box.children, opened)
        else:
            yield box


def readable(boxes: Sequence[Box], most: int) -> frozenset[str]:
    """Return the keys of the calls to open so that at most ``most`` boxes are seen: all, or down to some depth.

    Calls that call no other are opened last: a batch norm of twenty nodes stays one box.
    """
    calls = list(calls_in(boxes))
    depths = range(max((c.depth for c in calls), default=0), 0, -1)
    choices = [frozenset(c.key for c in calls)]
    choices += [frozenset(c.key for c in calls if c.depth <= depth and not c.is_flat) for depth in depths]
    return next((opened for opened in choices if len(list(folded(boxes, opened))) <= most), frozenset())


def sizes_text(shape: Sequence[int] | None) -> str:
    """Return ``"2x40x16"``; ``"scalar"`` where there are no dimensions, nothing where there is no tensor."""
    if shape is None:
        return ""
    return "x".join(map(str, shape)) or "scalar"


def bytes_text(count: int) -> str:
    """Return a number of bytes as it is read: ``"77.4 KB"``."""
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count} B"

"""Boxes of module calls, and the rows of a picture, from made-up reports."""

from __future__ import annotations

import pytest

from fxshard.drawing import Call, Drawing, Kind, folded, readable
from fxshard.memory import Moment
from fxshard.report import NodeReport, PlanReport
from fxshard.svg_rows import memory_line, place

SPLIT, WHOLE = "[S(3; 0,4,8)]", "[R]"


def node(name: str, module: str = "", *inputs: str, layout: str = SPLIT, reason: str = "") -> NodeReport:
    operator = f"aten.{name.rstrip('0123456789')}.default"
    return NodeReport(name, operator, (1, 8), layout=layout, module=module, inputs=inputs, reason=reason)


def drawing(*nodes: NodeReport) -> Drawing:
    return Drawing(PlanReport((2,), (0,), nodes))


def labels(found: Drawing) -> list[str]:
    return [box.label for box in found.boxes]


def test_a_module_with_one_node_is_that_node() -> None:
    assert labels(drawing(node("conv", "stem.0"), node("relu", "act"))) == ["stem.0", "act"]


def test_a_module_that_is_called_again_is_another_box() -> None:
    found = drawing(node("conv1", "a"), node("add1", "a"), node("mul"), node("conv2", "a"), node("add2", "a"))
    assert labels(found) == ["a", "mul", "a (call 2)"]
    assert [box.key for box in found.boxes] == ["a", "mul", "a#2"]


def test_many_alike_are_one_box() -> None:
    found = drawing(*(node(f"clone{i}") for i in range(7)), node("add"))
    assert labels(found) == ["7 x clone", "add"]
    assert len(found.boxes[0].nodes) == 7


def test_a_picture_opens_as_deep_as_it_may() -> None:
    found = drawing(*(node(f"add{i}", f"a.{i // 4}.{i % 4 // 2}") for i in range(16)))
    everything, outer = readable(found.boxes, 100), readable(found.boxes, 4)
    assert len(list(folded(found.boxes, everything))) == 16
    assert [box.key for box in folded(found.boxes, outer)] == ["a.0", "a.1", "a.2", "a.3"]
    assert [box.key for box in folded(found.boxes, readable(found.boxes, 0))] == ["a"]


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ((node("conv", "a"), node("mean", "a", "conv", layout=WHOLE)), Kind.SPLIT),
        ((node("conv", "a", layout=WHOLE), node("mean", "a", "conv")), Kind.WHOLE),
        ((node("conv", "a", reason="no rule"), node("mean", "a", "conv")), Kind.GATHERED),
    ],
)
def test_a_box_is_what_it_hands_on(nodes: tuple[NodeReport, ...], kind: Kind) -> None:
    found = drawing(*nodes, node("relu", "", "conv"))
    assert isinstance(found.boxes[0], Call)
    assert found.kind(found.boxes[0]) == kind


def test_values_that_skip_rows_have_lanes_of_their_own() -> None:
    rows = place(
        drawing(node("a"), node("b", "", "a"), node("c", "", "b"), node("d", "", "b", "c"), node("e", "", "a", "d")),
        frozenset(),
        0,
    )
    assert rows.edges == {(0, 1), (1, 2), (1, 3), (2, 3), (0, 4), (3, 4)}
    assert {(s.source, s.readers, s.lane) for s in rows.skips()} == {(1, (3,), 0), (0, (4,), 1)}


def drawing_of_draws(*more: NodeReport) -> Drawing:
    """Return the drawing of two draws, the second after the first, with a convolution between that reads neither."""

    def drawn(name: str, *after: str) -> tuple[NodeReport, NodeReport, NodeReport]:
        made = NodeReport(name, "fxshard.random.default", (1, 8), module=name, inputs=after)
        token = NodeReport(f"token_{name}", "getitem", (0,), "int8", "[R]", (0,), module=name, inputs=(name,))
        return made, token, NodeReport(f"value_{name}", "getitem", (1, 8), "float32", module=name, inputs=(name,))

    return drawing(*drawn("early"), node("conv"), *drawn("late", "token_early"), *more)


def test_the_order_of_draws_is_no_value() -> None:
    found = drawing_of_draws(node("add", "", "value_early", "value_late"))
    assert found.order == {("early", "token_early"), ("token_early", "late"), ("late", "token_late")}
    assert len(found.edges) == 7
    early = found.result(found.boxes[0])
    assert early is not None
    assert early.name == "value_early"
    unread = drawing_of_draws()
    assert unread.result(unread.boxes[0]) is None  # its token is read, its value is not


def test_the_order_of_draws_has_lanes_of_its_own() -> None:
    rows = place(drawing_of_draws(node("add", "", "value_early", "value_late")), frozenset(), 0)
    assert rows.edges == {(0, 2), (0, 3), (2, 3)}
    assert rows.order == {(0, 2)}
    assert {(s.source, s.readers, s.is_order) for s in rows.skips()} == {(0, (2,), True), (0, (3,), False)}
    assert len({s.lane for s in rows.skips()}) == 2
    both = place(drawing_of_draws(node("late2", "late", "value_early")), frozenset(), 0)
    assert both.edges == {(0, 2)}
    assert not both.order  # the second draw reads the first's value, too


def test_rows_do_not_overlap_and_lie_in_their_modules() -> None:
    found = drawing(*(node(f"add{i}", f"a.{i // 3}", *[f"add{i - 1}"][:i]) for i in range(9)))
    rows = place(found, readable(found.boxes, 100), 10)
    assert all(a.bottom < b.top for a, b in zip(rows.rows, rows.rows[1:], strict=False))
    outer, *inner = rows.frames
    assert all(outer.top < frame.top and frame.bottom < outer.bottom for frame in inner)


def test_memory_goes_down_and_comes_back_up() -> None:
    rows = place(drawing(node("conv", "a"), node("relu", "b"), node("mean", "c")), frozenset(), 0)
    forward = [Moment("forward", "x", size, module) for module, size in (("a", 1), ("", 2), ("b", 3), ("c", 4))]
    down = memory_line(rows, forward, upwards=False)
    up = memory_line(rows, reversed(forward), upwards=True)
    assert [size for _, size in down] == [1, 2, 3, 4]
    assert [y for y, _ in down] == sorted(y for y, _ in down)
    assert [y for y, _ in up] == sorted((y for y, _ in up), reverse=True)
    assert rows.rows[0].top < down[1][0] < rows.rows[0].bottom

"""What is said of a node's value: whether a gradient passes it, and which inputs are images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.values import image_positions, passes_gradient

UNKNOWN = object()
FLOAT, INTEGER = torch.ones(2), torch.ones(2).long()


def node(value: object, target: Any = torch.sort) -> torch.fx.Node:
    graph = torch.fx.Graph()
    made = graph.call_function(target, (graph.placeholder("x"),))
    if value is not UNKNOWN:
        made.meta["val"] = value
    return made


PASSED: dict[str, tuple[object, bool]] = {
    "float": (FLOAT, True),
    "complex": (FLOAT.to(torch.complex64), True),
    "integer": (INTEGER, False),
    "one-of-two": ((INTEGER, FLOAT), True),
    "integers": ((INTEGER, 3, None), False),
    "nested": ((INTEGER, [INTEGER, (FLOAT,)]), True),
    "nested-integers": ([(INTEGER,), {"n": 1}], False),
    "nested-unknown": ((INTEGER, [UNKNOWN]), True),
    "missing": (UNKNOWN, True),
    "none": (None, True),
}


@pytest.mark.parametrize("name", PASSED)
def test_a_gradient_passes_what_floats_and_what_is_not_known(name: str) -> None:
    value, passes = PASSED[name]
    assert passes_gradient(node(value)) == passes


def test_no_gradient_passes_detach() -> None:
    assert not passes_gradient(node(FLOAT, torch.ops.aten.detach.default))


def test_images_are_floating_and_have_the_most_dimensions() -> None:
    image, volume, row = torch.ones(2, 3, 4), torch.ones(2, 3, 4, 5), torch.ones(2, 3)
    assert image_positions([row, image, 3, None]) == [1]
    assert image_positions([image, volume, volume.long(), volume.half()]) == [1, 3]
    assert image_positions([row]) == image_positions([]) == []

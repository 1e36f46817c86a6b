"""Values are made in parts where only split work uses them, and whole where something needs the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.passes.push_splits import push_splits
from fxshard.values import plan_of
from tests.rank_graphs import calls, graphs, ops

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
SHAPE = (2, 4, 6, 15)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# id: function of the image, its factory, the factory's local size on rank 1 of 2
MADE: dict[str, tuple[Callable[[Tensor], Any], Any, list[int]]] = {
    "zeros": (lambda x: torch.cat([x, torch.zeros(2, 1, 6, 15)], 1), aten.zeros.default, [2, 1, 6, 7]),
    "full": (lambda x: x * torch.full((6, 15), 2.0), aten.full.default, [6, 7]),
    "new-ones": (lambda x: x.new_ones(2, 4, 6, 15) - x, aten.new_ones.default, [2, 4, 6, 7]),
    "chain": (lambda x: x + (torch.full((6, 15), 2.0) * 3).exp(), aten.full.default, [6, 7]),
    "broadcast chain": (lambda x: x + torch.full((6, 15), 2.0) * torch.ones(4, 1, 1), aten.ones.default, [4, 1, 1]),
    "broadcast": (lambda x: x * torch.ones(4, 1, 1), aten.ones.default, [4, 1, 1]),
    "also-whole": (lambda x: (x * (z := torch.ones(6, 15)), z), aten.ones.default, [6, 15]),
}


@pytest.mark.parametrize("name", MADE)
def test_factory_has_the_size_that_its_users_want(name: str) -> None:
    function, factory, size = MADE[name]
    made = graphs(Of(function), [torch.randn(SHAPE, requires_grad=True)]).at(1)
    (node,) = calls(made.local, factory)
    assert list(node.meta["val"].shape) == size
    whole = [n for n in calls(made.local, ops.slice.default) if n.args[0] is node]
    assert bool(whole) == (name == "also-whole")


def test_pushing_twice_changes_nothing() -> None:
    made = graphs(Of(MADE["zeros"][0]), [torch.randn(SHAPE, requires_grad=True)])
    before = [plan_of(n) for n in made.planned.graph.nodes]
    push_splits(made.planned, config=made.config)
    assert [plan_of(n) for n in made.planned.graph.nodes] == before


# id: function of the image and of its mean over H and W (whole on every rank), what is made in parts, its local size
GROWN: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any, list[int]]] = {
    "expand": (lambda x, m: x * m.expand_as(x), aten.expand.default, [2, 4, 6, 7]),
    "expand and permute": (
        lambda x, m: x * m.transpose(2, 3).expand(2, 4, 15, 6).transpose(2, 3),
        aten.expand.default,
        [2, 4, 7, 6],
    ),
    "expand and reshape": (
        lambda x, m: x / m.reshape(2, 2, 2, 1, 1).expand(2, 2, 2, 6, 15).reshape(2, 4, 6, 15),
        aten.expand.default,
        [2, 2, 2, 6, 7],
    ),
    "bilinear": (
        lambda x, m: x + F.interpolate(m, size=(6, 15), mode="bilinear"),
        aten.index_select.default,
        [2, 4, 6, 7],
    ),
    "also-whole": (lambda x, m: (x * (y := m.expand_as(x)), y), aten.expand.default, [2, 4, 6, 15]),
}


@pytest.mark.parametrize("name", GROWN)
def test_small_value_grows_in_parts(name: str) -> None:
    function, op, size = GROWN[name]
    x = torch.randn(SHAPE, requires_grad=True)
    made = graphs(Of(lambda x: function(x, x.mean((2, 3), keepdim=True))), [x]).at(1)
    node = calls(made.local, op)[-1]
    assert list(node.meta["val"].shape) == size
    whole = [n for n in calls(made.local, ops.slice.default) if n.args[0] is node]
    assert bool(whole) == (name == "also-whole")

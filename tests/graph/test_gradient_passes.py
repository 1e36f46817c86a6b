"""Gradient sums move to the parameters and into buckets: exact nodes of small graphs, no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.ops.gradient_bucket import SettleGradients, SumGradients
from fxshard.passes.bucket_gradients import bucket_gradients, gradient_buckets
from fxshard.passes.hoist_sums import hoist_sums
from tests.rank_graphs import Graphs, calls, graphs, ops

SUM = ops.sum_gradient.default


class Scaled(nn.Module):
    """A layer scale that is reshaped and cast before it is used, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gamma.to(x.dtype).view(1, -1, 1, 1)
        return F.conv2d(F.conv2d(y, self.weight).relu(), self.weight)


class Whole(nn.Module):
    """A weight whose norm is read by replicated work as well: its sum stays on the edge that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.weight.exp()
        return F.conv2d(x, scaled).mean((2, 3)) * scaled.sum()


def made(model: nn.Module, mesh_shape: tuple[int, ...] = (2,), dims: tuple[int, ...] = (3,)) -> Graphs:
    return graphs(model, [torch.randn(2, 4, 6, 8)], mesh_shape=mesh_shape, dims=dims)


def test_a_sum_moves_to_the_parameter() -> None:
    sums = calls(made(Scaled()).local, SUM)
    assert [n.args[0].op for n in sums] == ["placeholder"] * 2  # type: ignore[union-attr]
    assert {n.meta["val"].dtype for n in sums} == {torch.float64, torch.float32}


def test_sums_over_two_axes_move_together() -> None:
    found = made(Scaled(), (2, 2), (2, 3))
    members = [m for bucket in gradient_buckets(found.local.graph, found.config) for m in bucket]
    assert {m.groups for m in members} == {("axis-0", "axis-1")}
    assert len(calls(found.local, SUM)) == 2 * len(members) == 4


def test_a_value_that_replicated_work_reads_too_keeps_its_sum() -> None:
    local = made(Whole()).local
    (summed,) = calls(local, SUM)
    assert summed.args[0].target is torch.ops.aten.exp.default  # type: ignore[union-attr]


def test_moving_twice_changes_nothing() -> None:
    local = made(Scaled()).local
    before = [n.format_node() for n in local.graph.nodes]
    assert [n.format_node() for n in hoist_sums(local).graph.nodes] == before


class Layers(nn.Sequential):
    """Five layers of 4 x 4 weights without biases, 64 bytes each."""

    def __init__(self) -> None:
        super().__init__(*(nn.Conv2d(4, 4, 1, bias=False) for _ in range(5)))


@pytest.mark.parametrize(
    ("weights", "expected"), [(0, [[4], [3], [2], [1], [0]]), (2, [[4, 3], [2, 1], [0]]), (9, [[4, 3, 2, 1, 0]])]
)
def test_a_bucket_has_what_the_backward_comes_to_next(weights: int, expected: list[list[int]]) -> None:
    found = made(Layers())
    config = replace(found.config, bucket_cap_mb=weights * 64 / 2**20)
    convolutions = found.local.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default)
    layers = {n.args[1].args[0]: number for number, n in enumerate(convolutions)}
    buckets = gradient_buckets(found.local.graph, config)
    assert [[layers[member.source] for member in bucket] for bucket in buckets] == expected


def test_each_bucket_settles_first_and_sums_where_it_is_used() -> None:
    found = made(Layers())
    local = bucket_gradients(found.local, config=replace(found.config, bucket_cap_mb=3 * 64 / 2**20))
    local.graph.lint()
    kinds = [
        type(local.get_submodule(str(n.target))).__name__ if n.op == "call_module" else "conv"
        for n in local.graph.nodes
        if n.op == "call_module" or n.target is torch.ops.aten.conv2d.default
    ]
    settle, summed = SettleGradients.__name__, SumGradients.__name__
    assert kinds == [settle, settle, summed, "conv", "conv", summed, "conv", "conv", "conv"]
    assert not calls(local, SUM)
    assert bucket_gradients(local, config=found.config) is local  # nothing is left to do


def test_sums_over_two_axes_share_a_bucket_and_its_groups() -> None:
    found = made(Layers(), (2, 2), (2, 3))
    (members,) = gradient_buckets(found.local.graph, found.config)
    assert {m.groups for m in members} == {("axis-0", "axis-1")}
    local = bucket_gradients(found.local, config=found.config, groups=lambda _: ("world",))
    (summing,) = [m for m in local.modules() if isinstance(m, SumGradients)]
    assert summing.bucket.groups == ("world",)

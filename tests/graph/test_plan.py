"""Plans of small graphs: how each value is placed, what is expanded, and why something is gathered."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.errors import PlanError
from fxshard.layout import Partial, Replicate, Shard
from fxshard.passes.plan import aligned_bounds, plan
from fxshard.rules import registered
from fxshard.values import plan_of
from tests.rank_graphs import calls, graphs, ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = "[S(3; 0,8,16)]"
IMAGE = (2, 4, 6, 16)


class Of(nn.Module):
    """A function as a module, with layers it may use."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.layers, *inputs)


def image(*shape: int) -> Tensor:
    return torch.randn(shape or IMAGE, requires_grad=True)


@torch.library.custom_op("fxshard_tests::shuffle", mutates_args=())
def shuffle(x: Tensor) -> Tensor:
    """An operator that fxshard knows nothing of."""
    return x.flip(3).clone()


@shuffle.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# id: function of the image, layers, operator, how its output is placed
PLACED: dict[str, tuple[Callable[..., Any], tuple[nn.Module, ...], str, str]] = {
    "conv": (lambda c, x: c(x), (nn.Conv2d(4, 3, 3, padding=1),), "conv2d.default", WIDTH),
    "conv-strided": (lambda c, x: c(x), (nn.Conv2d(4, 3, 3, 2, 1),), "conv2d.default", "[S(3; 0,4,8)]"),
    "conv-unpadded": (lambda c, x: c(x), (nn.Conv2d(4, 3, 5),), "conv2d.default", "[S(3; 0,6,12)]"),
    "max-pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (), "max_pool2d.default", "[S(3; 0,4,8)]"),
    "relu": (torch.relu, (), "relu.default", WIDTH),
    "broadcast-channel": (lambda x: x + x.new_ones(4, 1, 1), (), "add.Tensor", WIDTH),
    "broadcast-row": (lambda x: x * x[0, 0, 0], (), "mul.Tensor", WIDTH),
    "sum-of-rows": (lambda x: x.sum(2), (), "sum.dim_IntList", "[S(2; 0,8,16)]"),
    "sum-of-columns": (lambda x: x.sum(3), (), "sum.dim_IntList", "[P(sum)]"),
    "mean": (lambda x: x.mean((2, 3)), (), "mean.dim", "[P(sum)]"),
    "flatten": (lambda x: x.flatten(2), (), "view.default", "[S(2; 0,8,16; outer=6)]"),
    "permute": (lambda x: x.permute(0, 2, 3, 1), (), "permute.default", "[S(2; 0,8,16)]"),
    "linear-pixels": (lambda f, x: f(x.transpose(1, 3)), (nn.Linear(4, 5),), "linear.default", "[S(1; 0,8,16)]"),
    "layer-norm-pixels": (
        lambda n, x: n(x.permute(0, 2, 3, 1)),
        (nn.LayerNorm(4),),
        "layer_norm.default",
        "[S(2; 0,8,16)]",
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_an_operator_is_placed(name: str) -> None:
    function, layers, op, expected = PLACED[name]
    found = graphs(Of(function, *layers), (image(),))
    assert found.layouts()[op][-1] == expected
    assert found.reasons() == []


def test_a_convolution_asks_for_the_window_of_its_outputs() -> None:
    found = graphs(nn.Conv2d(4, 3, (3, 5), padding=(1, 2)), (image(),)).plan("aten.conv2d.default")
    assert [str(layout) for layout in found.inputs] == ["[S(3; 0,8,16; held=-2:10,6:18)]", "[R]", "[R]"]


def test_the_chosen_dimension_is_the_widest_and_the_tail_the_last() -> None:
    assert graphs(Of(torch.relu), (image(1, 2, 6, 16),), dims=None).layouts()["relu.default"] == [WIDTH]
    assert graphs(Of(torch.relu), (image(1, 2, 16, 6),), dims=None).layouts()["relu.default"] == ["[S(2; 0,8,16)]"]
    assert graphs(Of(torch.relu), (image(1, 2, 8, 8),), dims=None).layouts()["relu.default"] == ["[S(3; 0,4,8)]"]


def test_two_axes_split_two_dimensions() -> None:
    found = graphs(nn.Conv2d(4, 3, 3, padding=1), (image(),), mesh_shape=(2, 2), dims=(2, 3))
    assert found.layouts()["conv2d.default"] == ["[S(2; 0,3,6), S(3; 0,8,16)]"]
    assert str(found.plan("aten.conv2d.default").inputs[0]) == (
        "[S(2; 0,3,6; held=-1:4,2:7), S(3; 0,8,16; held=-1:9,7:17)]"
    )
    assert [n.args[1] for n in calls(found.local, ops.halo_exchange.default)] == [2, 3]


def test_the_planner_splits_every_input_that_is_an_image_and_no_other() -> None:
    function = Of(lambda x, y, row, scale: x * y + row + scale.sum())
    found = graphs(function, (image(), image(), image(16), image(3)))
    placed = [p.outputs for n in found.planned.graph.nodes if n.op == "placeholder" and (p := plan_of(n))]
    assert [[str(layout) for layout in outputs] for outputs in placed] == [[WIDTH], [WIDTH], ["[R]"], ["[R]"]]
    assert found.layouts()["add.Tensor"] == [WIDTH, WIDTH]


def test_parameters_are_replicated() -> None:
    found = graphs(nn.Conv3d(2, 2, 3, padding=1), (image(1, 2, 5, 6, 16),), dims=(4,))
    weight = next(n for n in found.planned.graph.nodes if n.op == "placeholder")
    assert weight.meta["val"].ndim == 5
    placed = plan_of(weight)
    assert placed is not None
    assert placed.outputs[0].is_replicated


NARROW: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...], list[str]]] = {
    "asked": ((1, 2, 6, 3), (3,), (4,), ["dim 3 has 3 columns for 4 ranks, it is not split"]),
    "chosen": ((1, 2, 2, 3), None, (4,), ["dim 3 has 3 columns for 4 ranks, it is not split"]),
    "one-axis-of-two": ((1, 2, 6, 3), (2, 3), (2, 4), ["dim 3 has 3 columns for 4 ranks, it is not split"]),
    "more-axes-than-dimensions": ((1, 2, 6), None, (2, 2), ["mesh axis 1 has no dimension left to split"]),
    "no-image": ((5, 8), None, (4,), ["no input is floating or bytes with 3 or more dimensions, nothing is split"]),
    "replicated-as-asked": ((1, 2, 6, 3), (-1,), (4,), []),
    "wide": ((1, 2, 6, 4), (3,), (4,), []),
}
"""Shape, dims, mesh, and what is said."""


@pytest.mark.parametrize("name", NARROW)
def test_an_image_that_is_not_split_says_why(name: str) -> None:
    shape, dims, mesh, said = NARROW[name]
    found = graphs(Of(torch.relu), (image(*shape),), mesh_shape=mesh, dims=dims)
    assert found.reasons() == said
    (layout,) = found.layouts()["relu.default"]
    assert layout.count("R") == len(said) + (dims == (-1,))


def test_a_small_image_next_to_one_that_is_split_says_nothing() -> None:
    found = graphs(Of(lambda x, y: x * y), (image(), image(2, 4, 1, 1)))
    assert found.reasons() == []
    assert found.layouts()["mul.Tensor"] == [WIDTH]


@pytest.mark.parametrize(
    "inputs", [[torch.zeros(5, 8)], [torch.zeros(2, 3, 8, 8).long(), torch.zeros(5)]], ids=["flat", "labels"]
)
def test_placements_without_an_image_are_refused(inputs: list[Tensor]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        graphs(Of(lambda *given: [x + 1 for x in given]), inputs)
    error = caught.value.inner_exception
    assert isinstance(error, PlanError)
    assert "placements split dim 3, but no input is an image (floating or bytes, 3 or more dimensions)" in str(error)
    assert ("int64[2, 3, 8, 8], float32[5]" if len(inputs) == 2 else "inputs: float32[5, 8].") in str(error)


def test_a_dimension_that_no_input_has_is_refused() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        graphs(Of(torch.relu), (image(),), dims=(4,))
    error = caught.value.inner_exception
    assert isinstance(error, PlanError)
    assert "placements split dim 4 of inputs of shapes [(2, 4, 6, 16)]; name a dim below 4" in str(error)


def test_terms_of_a_sum_are_added_before_they_are_used() -> None:
    found = graphs(Of(lambda x: torch.relu(x.sum(3))), (image(),))
    assert found.plan("aten.sum.dim_IntList").outputs[0][0] == Partial()
    assert found.plan("aten.relu.default").inputs[0].is_replicated
    assert [n.args[1] for n in calls(found.local, ops.all_reduce.default)] == ["sum"]


def test_an_image_without_a_gradient_is_cut_where_it_is_whole() -> None:
    conv = nn.Conv2d(4, 3, 3, padding=1)
    assert len(calls(graphs(conv, (image(),)).local, ops.halo_exchange.default)) == 1
    assert not calls(graphs(conv, (image().detach(),)).local, ops.halo_exchange.default)


def test_one_conversion_serves_every_user() -> None:
    first, second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    found = graphs(Of(lambda a, b, x: a(x) + b(x), first, second), (image(),))
    assert len(calls(found.local, ops.halo_exchange.default)) == 1
    found = graphs(Of(lambda x: torch.relu(x.sum(3)) + x.sum(3).exp()), (image(),))
    assert len(calls(found.local, ops.all_reduce.default)) == 2  # two sums, one each


EXPANDED: dict[str, tuple[nn.Module, str, list[str]]] = {
    "batch-norm-training": (nn.BatchNorm2d(4), "batch_norm", ["aten.var_mean.correction", "aten.rsqrt.default"]),
    "group-norm": (nn.GroupNorm(2, 4), "group_norm", ["aten.var_mean.correction", "aten.rsqrt.default"]),
    "instance-norm": (nn.InstanceNorm2d(4, affine=True), "instance_norm", ["aten.var_mean.correction"]),
    "layer-norm-over-columns": (nn.LayerNorm(16), "layer_norm", ["aten.var_mean.correction"]),
    "linear-over-columns": (nn.Linear(16, 3), "linear", ["aten.mm.default"]),
    "global-pool": (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d", ["aten.mean.dim"]),
    "padding-same": (nn.Conv2d(4, 3, 3, padding="same"), "conv2d.padding", ["aten.convolution.default"]),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_an_operator_is_expanded_into_operators_with_rules(name: str) -> None:
    model, gone, come = EXPANDED[name]
    found = graphs(model, (image(),))
    targets = found.targets()
    assert not any(gone in target for target in targets)
    assert set(come) <= set(targets)
    assert found.reasons() == []


def test_a_batch_norm_with_running_statistics_is_local() -> None:
    found = graphs(nn.BatchNorm2d(4).eval(), (image(),))
    assert any("batch_norm" in target for target in found.targets())
    assert not [n for n in found.local.graph.nodes if str(n.target).startswith(("fxshard.all_", "fxshard.halo"))][1:]


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.0), nn.Dropout2d(0.0), nn.AlphaDropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout2d(0.5).eval()],
    ids=["dropout-0", "dropout2d-0", "alpha-dropout-0", "dropout-eval", "dropout2d-eval"],
)
def test_a_dropout_that_drops_nothing_is_no_reason_to_gather(layer: nn.Module) -> None:
    found = graphs(Of(lambda d, x: torch.relu(d(x)), layer), (image(),))
    assert found.reasons() == []
    assert found.layouts()["relu.default"] == [WIDTH]


def test_an_unknown_operator_is_gathered_and_the_plan_says_so() -> None:
    found = graphs(Of(lambda x: torch.relu(torch.ops.fxshard_tests.shuffle(x) + x)), (image(),))
    shuffled = found.plan("fxshard_tests.shuffle.default")
    assert shuffled.reason == "no rule for fxshard_tests.shuffle.default"
    assert [layout.is_replicated for layout in (*shuffled.inputs, *shuffled.outputs)] == [True, True]
    assert found.layouts()["relu.default"] == [WIDTH]  # and split again where it meets the image
    names = [str(n.target) for n in found.local.graph.nodes if n.op == "call_function"]
    order = [names.index(f"{op}.default") for op in ("fxshard.all_gather", "fxshard_tests.shuffle")]
    assert order == sorted(order)


@contextmanager
def without_rules(*gone: Any) -> Iterator[None]:
    """Take rules out of the registry."""
    rules = registered()
    kept = {op: rules.pop(op) for op in gone}
    try:
        yield
    finally:
        rules.update(kept)


def test_an_operator_whose_rule_is_taken_out_is_gathered_with_its_reason() -> None:
    conv = nn.Conv2d(4, 3, 3, padding=1)
    with without_rules(torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default):
        found = graphs(conv, (image(),))
    assert found.reasons() == ["no rule for aten.convolution.default"]
    assert graphs(conv, (image(),)).reasons() == []


def test_a_decomposition_stands_in_for_a_rule_that_is_taken_out() -> None:
    with without_rules(torch.ops.aten.conv2d.default):
        found = graphs(nn.Conv2d(4, 3, 3, padding=1), (image(),))
    assert found.reasons() == []
    assert found.layouts()["convolution.default"] == [WIDTH]


GATHERED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "few-columns": (nn.Conv2d(4, 3, 2, stride=8), IMAGE, "aten.conv2d.default: 2 output columns for 4 ranks"),
    "few-pool-columns": (nn.MaxPool2d((1, 5)), IMAGE, "aten.max_pool2d.default: 3 output columns for 4 ranks"),
    "no-such-view": (
        Of(lambda x: x.reshape(2, 32, 12) * 2),
        IMAGE,
        "aten.view.default: the split of dim 3 does not survive (2, 4, 6, 16) -> (2, 32, 12)",
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_a_gather_has_its_reason_with_the_numbers(name: str) -> None:
    model, shape, reason = GATHERED[name]
    found = graphs(model, (image(*shape),), mesh_shape=(4,))
    assert found.reasons() == [reason]
    assert len(calls(found.local, ops.all_gather.default)) == 1


def test_a_reason_names_the_axis_that_is_gathered_by_its_layout() -> None:
    found = graphs(nn.Conv2d(4, 3, (1, 8), stride=(1, 8)), (image(2, 4, 8, 16),), mesh_shape=(2, 4), dims=(2, 3))
    conv = found.plan("aten.conv2d.default")
    assert conv.outputs[0][0] == Shard(2, (0, 4, 8))
    assert conv.outputs[0][1] == Replicate()
    assert conv.reason == "aten.conv2d.default: 2 output columns for 4 ranks"


def test_a_branch_that_reads_memory_by_strides_is_refused() -> None:
    def branches(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda z: z.as_strided((2, 2), (1, 1)) * 2, lambda z: z[0, 0, :2, :2] * 3, (x,))

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        graphs(Of(branches), (image(),))
    error = caught.value.inner_exception
    assert isinstance(error, PlanError)
    assert "aten.as_strided.default in cond reads memory by strides at tests/graph/test_plan.py" in str(error)


def test_planning_twice_changes_nothing() -> None:
    found = graphs(nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()), (image(),))
    before = [(n.format_node(), plan_of(n)) for n in found.planned.graph.nodes]
    again = plan(found.planned, config=replace(found.config, rank=None))
    assert [(n.format_node(), plan_of(n)) for n in again.graph.nodes] == before


def test_every_rank_emits_the_same_nodes_with_its_own_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.AvgPool2d(3, 2, 1))
    found = graphs(model, (image(2, 4, 6, 17),), mesh_shape=(3,))
    sequences = [[str(n.target) for n in found.at(rank).local.graph.nodes] for rank in range(3)]
    assert sequences[0] == sequences[1] == sequences[2]
    (output,) = (n for n in found.local.graph.nodes if n.op == "output")
    assert len(output.args[0]) == 1  # buffer updates are written by the graph, not returned


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        (2048, 2, (0, 1024, 2048)),
        (4096, 8, tuple(range(0, 4097, 512))),
        (130, 2, (0, 64, 130)),  # one part in sixteen longer than the mean at most
        (97, 3, (0, 32, 64, 97)),
        (40, 4, (0, 10, 20, 30, 40)),
        (5, 4, (0, 1, 3, 4, 5)),
    ],
    ids=str,
)
def test_bounds_are_aligned_as_far_as_the_balance_allows(size: int, ranks: int, expected: tuple[int, ...]) -> None:
    assert aligned_bounds(size, ranks) == expected

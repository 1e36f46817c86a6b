"""The measurement itself: it must see every kind of wrong, and call rounding rounding."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.compare import (
    Case,
    Difference,
    Kind,
    Mismatch,
    Trace,
    Worst,
    compare_models,
    difference,
    rounding_floor,
    run_steps,
    within_own_rounding,
)
from fxshard.trace import Step, build_model, map_leaves, named_leaves

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Transform: TypeAlias = Callable[[nn.Module], nn.Module]


class ConvNorm(nn.Module):
    """The conv's bias is followed by batch norm: its true gradient is zero."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(torch.relu(self.norm(self.conv(x)))))
        return out


def conv_norm() -> tuple[nn.Module, tuple[Tensor]]:
    return ConvNorm(), (torch.randn(4, 3, 6, 8),)


def conv_norm_dropout() -> tuple[nn.Module, tuple[Tensor]]:
    return ConvNorm(dropout=0.5), (torch.randn(4, 3, 6, 8),)


def linear() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Linear(3, 2), (torch.randn(4, 3),)


class Nested(nn.Module):
    def forward(self, image: Tensor, index: Tensor, *, factor: float) -> dict[str, Any]:
        return {"images": [image * factor, image.sum()], "index": index + 1, "factor": factor, "nothing": None}


def nested() -> tuple[nn.Module, dict[str, Any]]:
    return Nested(), {"image": torch.randn(2, 3), "index": torch.arange(3), "factor": 2.0}


CASE = Case(build=conv_norm)


def change_input(change: Callable[[Tensor], Tensor]) -> Transform:
    def transform(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda _module, args: (change(args[0]),))
        return model

    return transform


def change_output(change: Callable[[Tensor], Tensor]) -> Transform:
    def transform(model: nn.Module) -> nn.Module:
        model.register_forward_hook(lambda _module, _args, output: change(output))
        return model

    return transform


def after_forward(action: Callable[[nn.Module], object]) -> Transform:
    def transform(model: nn.Module) -> nn.Module:
        def hook(module: nn.Module, _args: object, _output: object) -> None:
            action(module)

        model.register_forward_hook(hook)
        return model

    return transform


def reorder_batch(model: nn.Module) -> nn.Module:
    """The same function, summed in another order: it differs by rounding only."""
    return change_output(lambda y: y.flip(0))(change_input(lambda x: x.flip(0))(model))


def drop_right_half(x: Tensor) -> Tensor:
    return torch.cat([x[..., :4], x[..., 4:].detach()], -1)


def move_mean(model: nn.Module) -> None:
    norm = model.get_submodule("norm")
    norm.register_buffer("running_mean", model.get_buffer("norm.running_mean") + 1e-6)


def count_twice(model: nn.Module) -> None:
    model.get_buffer("norm.num_batches_tracked").add_(1)


def draw(_model: nn.Module) -> None:
    torch.rand(1)


def freeze_head_bias(model: nn.Module) -> nn.Module:
    model.get_parameter("head.bias").requires_grad_(False)
    return model


def halve_gradient(name: str) -> Transform:
    def transform(model: nn.Module) -> nn.Module:
        model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)
        return model

    return transform


def shift_gradient(name: str, by: float) -> Transform:
    def transform(model: nn.Module) -> nn.Module:
        model.get_parameter(name).register_hook(lambda gradient: gradient + by)
        return model

    return transform


def test_the_same_model_is_equal_bit_by_bit() -> None:
    found = compare_models(Case(build=conv_norm_dropout), lambda model: model)
    assert found.exact(0.0)
    assert found.strides == ()
    assert {kind for kind, worst in found.worst.items() if worst.where} == {
        "output",
        "input gradient",
        "parameter gradient",
        "buffer",
        "vanishing",
    }


def test_another_order_of_sums_is_rounding() -> None:
    found = compare_models(CASE, reorder_batch)
    assert found.exact()
    assert not found.exact(0.0)


def test_gradient_whose_true_value_is_zero_is_judged_against_the_largest() -> None:
    case = dataclasses.replace(CASE, steps=1)
    reference = run_steps(*build_model(case), case)
    model, inputs = build_model(case)
    other = run_steps(reorder_batch(model), inputs, case)
    a, b = (t.steps[0].parameter_gradients["conv.bias"] for t in (reference, other))
    assert a is not None
    assert b is not None
    assert (a - b).abs().max() / a.abs().max() > 1e-3, "by its own size this gradient would be wrong"
    found = difference(reference, other)
    assert found.worst["vanishing"].where == "step 0, parameter gradient conv.bias"
    assert 0 < found.worst["vanishing"].error < 1e-9


def test_a_gradient_in_place_of_zero_is_found() -> None:
    def transform(model: nn.Module) -> nn.Module:
        model.get_parameter("conv.bias").register_hook(lambda gradient: gradient + 1e-6)
        return model

    found = compare_models(CASE, transform)
    assert found.worst["vanishing"].error > 1e-6
    assert not found.exact()


@pytest.mark.parametrize(
    ("transform", "kind", "name"),
    [
        pytest.param(change_output(lambda y: y * (1 + 1e-7)), "output", "output", id="output"),
        pytest.param(change_input(drop_right_half), "input gradient", "input[0]", id="dropped half of a gradient"),
        pytest.param(halve_gradient("conv.weight"), "parameter gradient", "conv.weight", id="parameter gradient"),
        pytest.param(after_forward(move_mean), "buffer", "norm.running_mean", id="running mean"),
    ],
)
def test_wrong_values_are_found_and_named(transform: Transform, kind: Kind, name: str) -> None:
    found = compare_models(dataclasses.replace(CASE, steps=1), transform)
    assert found.worst[kind].error > 1e-8
    assert found.worst[kind].where == f"step 0, {kind} {name}"
    assert [k for k, worst in found.worst.items() if worst.error > 1e-9] == [kind] or kind == "output"
    assert not found.exact()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        pytest.param(
            change_input(lambda x: x.detach()),
            "step 0, input gradient input[0]: none in place of float64[4, 3, 6, 8]",
            id="no input gradient",
        ),
        pytest.param(
            freeze_head_bias,
            "step 0, parameter gradient head.bias: none in place of float64[2]",
            id="no parameter gradient",
        ),
        pytest.param(
            change_output(lambda y: y[..., :-1]),
            "step 0, output output: float64[4, 2, 6, 7] in place of float64[4, 2, 6, 8]",
            id="shape",
        ),
        pytest.param(
            change_output(lambda y: y.float()),
            "step 0, output output: float32[4, 2, 6, 8] in place of float64[4, 2, 6, 8]",
            id="dtype",
        ),
        pytest.param(
            after_forward(count_twice),
            "step 0, buffer norm.num_batches_tracked: other values, where rounding is no excuse",
            id="integer buffer",
        ),
        pytest.param(
            after_forward(draw),
            "step 0, generator cpu: another state: the random draws were not the same",
            id="generator",
        ),
        pytest.param(nn.Sequential, "step 0, parameter gradient 0.conv.bias: not there in the reference", id="name"),
        pytest.param(nn.Sequential, "step 0, buffer norm.running_var: missing", id="missing"),
    ],
)
def test_mismatches_are_found_and_named(transform: Transform, message: str) -> None:
    found = compare_models(CASE, transform)
    assert message in map(str, found.mismatches)
    assert not found.exact(float("inf"))


def test_other_draws_are_found_even_where_the_state_agrees_later() -> None:
    """Dropout draws the same count of numbers whatever it masks: the outputs must show the difference."""
    found = compare_models(Case(build=conv_norm_dropout), reorder_batch)
    assert found.mismatches == ()
    assert found.worst["output"].error > 0.1


def test_wrong_only_in_a_later_step_is_found() -> None:
    def transform(model: nn.Module) -> nn.Module:
        calls: list[None] = []

        def change(y: Tensor) -> Tensor:
            calls.append(None)
            return y if len(calls) == 1 else y * 1.01

        return change_output(change)(model)

    assert compare_models(CASE, transform).worst["output"].where == "step 1, output output"
    assert compare_models(dataclasses.replace(CASE, steps=1), transform).exact(0.0)


def test_other_strides_are_noted_and_not_judged() -> None:
    to_last = change_output(lambda y: y.contiguous(memory_format=torch.channels_last))
    found = compare_models(dataclasses.replace(CASE, steps=1), to_last)
    assert found.exact()
    assert [note.where for note in found.strides] == ["step 0, output output"]


def output_trace(*values: Any) -> Trace:
    outputs = {str(number): value for number, value in enumerate(values)}
    return Trace((Step(outputs, {}, {}, {}, {}),))


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([float("nan"), 2.0], [float("nan"), 2.0], 0.0),
        ([float("nan"), 2.0], [1.0, 2.0], float("inf")),
        ([float("-inf"), 2.0], [float("-inf"), 1.0], 0.5),
        ([float("inf"), 2.0], [float("-inf"), 2.0], float("inf")),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-300], float("inf")),
        ([], [], 0.0),
    ],
)
def test_relative_error(a: list[float], b: list[float], error: float) -> None:
    found = difference(*(output_trace(torch.tensor(values, dtype=torch.float64)) for values in (a, b)))
    assert found.error == error


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [(3, 3, True), (3, 4, False), (None, None, True), (None, torch.ones(1), False), (True, torch.tensor(1), False)],
)
def test_plain_outputs_are_equal_or_a_mismatch(a: object, b: object, equal: bool) -> None:
    assert difference(output_trace(a), output_trace(b)).exact(0.0) is equal


def test_table_reads_well() -> None:
    found = Difference(
        {"output": Worst(2.5e-16, "step 0, output output"), "buffer": Worst()},
        (Mismatch("step 1, generator cpu", "another state"),),
    )
    assert str(found).splitlines() == [
        "kind                 worst error  tensor",
        "output                   2.5e-16  step 0, output output",
        "buffer                         -",
        "mismatch  step 1, generator cpu: another state",
    ]


def test_steps_do_not_accumulate_and_change_the_weights() -> None:
    case = Case(build=linear)
    first, second = run_steps(*build_model(case), case).steps
    for name in ("weight", "bias"):  # the gradients of a linear layer do not depend on its weights
        assert torch.equal(_tensor(first.parameter_gradients[name]), _tensor(second.parameter_gradients[name]))
    change = (first.outputs["output"] - second.outputs["output"]).abs().max() / first.outputs["output"].abs().max()
    assert 1e-4 < change < 0.2


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def test_loss_leaves_the_generator_alone() -> None:
    case = Case(build=linear, seed=7)
    steps = run_steps(*build_model(case), case).steps
    torch.manual_seed(7)
    assert all(torch.equal(step.generators["cpu"], torch.get_rng_state()) for step in steps)


def test_inputs_are_not_changed() -> None:
    model, inputs = build_model(CASE)
    assert isinstance(inputs, tuple)
    (x,) = inputs
    before = x.clone()
    run_steps(model, (x,), CASE)
    assert torch.equal(x, before)
    assert x.grad is None
    assert not x.requires_grad


def test_no_grad_keeps_outputs_buffers_and_generators() -> None:
    case = Case(build=conv_norm_dropout, no_grad=True)
    step = run_steps(*build_model(case), case).steps[1]
    assert (step.input_gradients, step.parameter_gradients) == ({}, {})
    assert step.buffers["norm.num_batches_tracked"] == 2
    assert not compare_models(case, after_forward(draw)).exact(float("inf"))


def test_a_step_keeps_its_own_values() -> None:
    """Buffers and gradients are changed in place by the next step."""
    steps = run_steps(*build_model(CASE), CASE).steps
    assert [int(_tensor(step.buffers["norm.num_batches_tracked"])) for step in steps] == [1, 2]
    assert not torch.equal(*(_tensor(step.buffers["norm.running_mean"]) for step in steps))


def test_eval_keeps_the_running_statistics() -> None:
    case = Case(build=conv_norm, training=False)
    assert run_steps(*build_model(case), case).steps[1].buffers["norm.num_batches_tracked"] == 0


def test_dict_inputs_and_nested_outputs() -> None:
    case = Case(build=nested, steps=1)
    step = run_steps(*build_model(case), case).steps[0]
    names = [f"output[{key}]" for key in ("'images'][0", "'images'][1", "'index'", "'factor'", "'nothing'")]
    assert list(step.outputs) == names
    assert step.outputs["output['index']"].tolist() == [1, 2, 3]
    assert list(step.input_gradients) == ["input['image']"]
    assert step.input_gradients["input['image']"] is not None


def test_own_loss_is_used() -> None:
    case = Case(build=linear, steps=1, loss=lambda y: 3 * y.sum())
    step = run_steps(*build_model(case), case).steps[0]
    assert _tensor(step.parameter_gradients["bias"]).tolist() == [12.0, 12.0]


def test_dtypes_have_the_same_weights() -> None:
    models = [build_model(Case(build=conv_norm, dtype=dtype))[0] for dtype in (torch.float64, torch.float32)]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b.double())


@dataclasses.dataclass
class Boxes:
    corners: list[int]
    score: float


def test_leaves_of_dataclasses_and_namedtuples() -> None:
    assert list(named_leaves(Boxes([1, 2], 0.5), "y")) == [("y.corners[0]", 1), ("y.corners[1]", 2), ("y.score", 0.5)]
    assert map_leaves(lambda x: x * 2, Boxes([1, 2], 0.5)) == {"corners": [2, 4], "score": 1.0}
    top = torch.tensor([[1.0, 3.0]]).max(1)
    assert map_leaves(torch.neg, torch.return_types.max(top))[0].tolist() == [-3.0]


def traces32(transform: Transform, dtype: torch.dtype = torch.float32) -> tuple[Trace, Trace, Trace]:
    case64, case32 = CASE, dataclasses.replace(CASE, dtype=dtype)
    model, inputs = build_model(case32)
    return (
        run_steps(*build_model(case64), case64),
        run_steps(*build_model(case32), case32),
        run_steps(transform(model), inputs, case32),
    )


def test_float32_rounding_is_within_twice_the_floor() -> None:
    assert within_own_rounding(*traces32(lambda model: model))


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(change_output(lambda y: y * (1 + 1e-4)), id="output"),
        pytest.param(halve_gradient("head.weight"), id="gradient"),
        pytest.param(shift_gradient("conv.bias", 1e-3), id="gradient whose true value is zero"),
        pytest.param(after_forward(count_twice), id="integer buffer"),
        pytest.param(after_forward(draw), id="generator"),
        pytest.param(change_output(lambda y: y.double()), id="dtype"),
        pytest.param(freeze_head_bias, id="no gradient"),
    ],
)
def test_more_than_float32_rounding_is_found(transform: Transform) -> None:
    assert not within_own_rounding(*traces32(transform))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_judged_by_their_own_rounding(dtype: torch.dtype) -> None:
    assert within_own_rounding(*traces32(lambda model: model, dtype), dtype)
    assert not within_own_rounding(*traces32(change_output(lambda y: y * 1.2), dtype), dtype)
    assert not within_own_rounding(*traces32(halve_gradient("head.weight"), dtype), dtype)


def test_rounding_floor_is_that_of_float32() -> None:
    floor = rounding_floor(CASE)
    assert floor.mismatches == ()
    assert 1e-9 < floor.worst["parameter gradient"].error < 1e-4
    assert re.search(r"vanishing .* step \d, parameter gradient conv.bias", str(floor))

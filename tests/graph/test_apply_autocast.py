"""A graph with autocast applied computes what eager autocast computes, bit for bit, in the same dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fxshard._torch import BackendCompilerFailed, FakeTensorMode, make_fx
from fxshard.passes import autocast_effect
from fxshard.passes.apply_autocast import apply_autocast, has_regions
from fxshard.passes.autocast_effect import CAST
from tests.graph.autocast_match import BF16, FP16, FP32, Compiler, Net, Under, compared, compiled

if TYPE_CHECKING:
    from collections.abc import Callable


def region(dtype: torch.dtype | None = None, *, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def conv_norms(net: Net, x: Tensor) -> Any:
    y = F.relu(net.batch_norm(net.conv(x)), inplace=True)
    return net.group_norm(y), net.layer_norm(y)


def disabled_inside(net: Net, x: Tensor) -> Any:
    y = net.conv(x)
    with region(enabled=False):
        y = net.conv(y.float())
    return net.conv(y)


def enabled_in_disabled(net: Net, x: Tensor) -> Any:
    with region(enabled=False):
        y = net.conv(x)
        with region():
            z = net.up(y)
        y = net.batch_norm(y)
    return net.linear(y), z


def no_grad_first(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        y = net.conv(x)
    return net.conv(x) + y


def mutated(net: Net, x: Tensor) -> Any:
    y, other = net.conv(x), x.to(BF16)
    y += other
    y.mul_(other)
    z = torch.zeros(2, 4, 5, 6)
    z.add_(y).clamp_(min=0)
    return y.add_(1), z


def views(net: Net, x: Tensor) -> Any:
    y = net.conv(x)
    z = y.transpose(1, 3)[:, ::2]
    y.relu_()
    return net.linear(z.permute(0, 3, 2, 1).flatten(2).reshape(2, 4, 3, 5)[..., None].expand(2, 4, 3, 5, 6)), y


def several_outputs(net: Net, x: Tensor) -> Any:
    y = net.conv(x)
    values, indices = y.max(dim=3)
    return torch.var_mean(y, 1), values, indices, torch.cat(y.chunk(2, dim=1), dim=2), y.topk(2)[0]


def losses(net: Net, x: Tensor) -> Any:
    y, target = net.conv(x), torch.ones(2, 5, 6, dtype=torch.long)
    return F.cross_entropy(y, target), F.mse_loss(y, x), F.nll_loss(y.log_softmax(1), target), F.smooth_l1_loss(y, x)


FAMILIES: dict[str, Callable[[Net, Tensor], Any]] = {
    "conv": lambda net, x: net.conv(x),
    "conv_norms": conv_norms,
    "transposed": lambda net, x: net.up(net.conv(x)),
    "linear_twice": lambda net, x: net.linear(net.linear(x)),
    "one_input_twice": lambda net, x: (net.conv(x), net.up(x), x @ x.mT),
    "matmul": lambda net, x: (x @ x.mT, torch.matmul(x, net.linear.weight), x[0, 0].mm(x[1, 1].T)),
    "addmm": lambda net, x: torch.addmm(x[0, 0], net.conv(x)[0, 0, :, :5], x[1, 1]),
    "einsum": lambda net, x: torch.einsum("nchw,nchv->ncwv", x, net.conv(x)) + torch.einsum("nchw->ncw", x)[..., None],
    "cat_mixed": lambda net, x: (torch.cat([net.conv(x), x], 1), torch.stack([x, net.conv(x), x])),
    "float": lambda net, x: net.conv(x).float() * x + net.conv(x).to(torch.float64),
    "pointwise_mixed": lambda net, x: torch.where(x > 0, net.conv(x), x).sigmoid() * net.conv(x),
    "softmax": lambda net, x: net.conv(x).softmax(1) + F.log_softmax(x, 1) + net.conv(x).sum(3, keepdim=True),
    "prelu": lambda net, x: net.prelu(net.conv(x)) + F.gelu(net.conv(x)),
    "float32_policy": lambda net, x: (F.avg_pool3d(net.conv(x), 2), net.conv(x).prod(3), torch.cdist(x, net.conv(x))),
    "grid_sample": lambda net, x: F.grid_sample(net.conv(x), x[:, :2].movedim(1, 3).tanh(), align_corners=False),
    "resize": lambda net, x: F.interpolate(net.conv(x), scale_factor=2, mode="bilinear"),
    "dropout": lambda net, x: F.dropout(net.conv(F.dropout(x, 0.3)), 0.5) * torch.rand_like(x),
    "attention": lambda net, x: F.scaled_dot_product_attention(x, x, x * 2),
    "losses": losses,
    "disabled_inside": disabled_inside,
    "enabled_in_disabled": enabled_in_disabled,
    "no_grad_first": no_grad_first,
    "mutated": mutated,
    "views": views,
    "several_outputs": several_outputs,
}


@pytest.mark.parametrize("ambient", [True, False], ids=["ambient", "inner"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_gradients_and_dtypes_are_those_of_eager_autocast(family: str, *, ambient: bool) -> None:
    result, compiler = compared(FAMILIES[family], ambient=ambient)
    assert result.exact(0.0), result
    assert not has_regions(compiler.applied)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["conv_norms", "matmul", "einsum", "cat_mixed", "disabled_inside"])
def test_float16(family: str) -> None:
    result, compiler = compared(FAMILIES[family], FP16)
    assert result.exact(0.0), result
    assert {dtype for _, dtype in compiler.casts()} <= {FP16, FP32}


def test_attention_as_one_python_function_is_traced_with_its_casts(caplog: pytest.LogCaptureFixture) -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = x.flatten(1, 2)
        return net.attention(y, y, y)[0]

    result, _ = compared(forward)
    assert result.worst["output"].error == 0
    assert result.exact(2e-2), result  # its linear layers are products and sums, whose gradients round elsewhere
    assert caplog.records == []  # attempts that fail are no news


def test_a_kernel_with_low_precision_inside_may_be_wider_than_eager_mode() -> None:
    result, compiler = compared(lambda net, x: net.bilinear(x, x))  # its kernel calls bmm, which eager mode casts
    assert compiler.casts() == []
    assert result.exact(2e-2), result


def test_the_region_of_another_dtype_casts_to_it() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = net.conv(x)
        with region(FP16):
            return y, net.linear(x * 2)

    result, compiler = compared(forward)
    assert result.exact(0.0), result
    assert [dtype for _, dtype in compiler.casts()] == [BF16] * 3 + [FP16] * 3


def test_calls_stay_whole_behind_casts_of_their_inputs() -> None:
    _, compiler = compared(conv_norms)
    assert [n.target for n in compiler.nodes()] == [
        *(CAST, CAST, CAST, torch.conv2d),
        *("add_", F.batch_norm, F.relu, F.group_norm, F.layer_norm),
    ]
    assert {dtype for _, dtype in compiler.casts()} == {BF16}


def test_a_call_with_casts_inside_becomes_its_trace() -> None:
    _, compiler = compared(lambda net, x: torch.einsum("nchw,nchv->ncwv", x, x) + torch.einsum("nchw,nchv->ncwv", x, x))
    programs = [n for n in compiler.nodes() if n.op == "call_module"]
    assert [n.target for n in programs] == ["autocast_einsum"] * 2
    program = compiler.applied.get_submodule("autocast_einsum")  # type: ignore[union-attr]
    assert isinstance(program, GraphModule)
    targets = [n.target for n in program.graph.nodes]
    assert targets.count(torch.ops.aten.bmm.default) == 1
    assert targets.count(CAST) == 2


def test_parameters_are_cast_once_in_a_region_and_activations_each_time() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = x * 2
        return net.conv(y), net.conv(y)

    def two_regions(net: Net, x: Tensor) -> Any:
        with region():
            y = net.conv(x)
        with region():
            return y, net.conv(x)

    _, compiler = compared(forward)
    assert [name for name, _ in compiler.casts()].count("y") == 2
    assert len(compiler.casts()) == 4
    model = Net(two_regions)
    compiler = compiled(model)
    model(torch.ones(2, 4, 5, 6))
    assert len(compiler.casts()) == 6


def test_casts_carry_the_metadata_of_their_call() -> None:
    _, compiler = compared(FAMILIES["conv"])
    conv = compiler.nodes()[-1]
    for node in compiler.nodes()[:-1]:
        assert node.meta["example_value"].dtype == BF16
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            assert node.meta[key] == conv.meta[key]


def test_a_graph_without_autocast_is_returned_as_it_is() -> None:
    model = Net(conv_norms)
    compiler = compiled(model)
    model(torch.ones(2, 4, 5, 6))
    assert compiler.applied is compiler.given


def test_a_graph_with_disabled_regions_alone_loses_them() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        with region(enabled=False):
            return net.conv(x)

    model = Net(forward)
    compiler = compiled(model)
    assert model(torch.ones(2, 4, 5, 6)).dtype == FP32
    assert compiler.names() == ["conv2d"]
    assert compiler.casts() == []


def test_the_given_graph_and_the_autocast_state_are_not_changed() -> None:
    class Recorder(Compiler):
        def __call__(self, gm: GraphModule, inputs: Any) -> Any:
            before, code, state = [n.format_node() for n in gm.graph.nodes], gm.code, torch.get_rng_state()
            with region(FP16, enabled=False):
                apply_autocast(gm, inputs)
                assert not torch.is_autocast_enabled("cpu")
                assert torch.get_autocast_dtype("cpu") == FP16
            assert [n.format_node() for n in gm.graph.nodes] == before
            assert gm.code == code
            assert torch.equal(torch.get_rng_state(), state)
            return super().__call__(gm, inputs)

    model = Under(Net(FAMILIES["dropout"]), BF16)
    torch.compiler.reset()
    model.compile(backend=Recorder(), fullgraph=True, dynamic=False)
    model(torch.ones(2, 4, 5, 6))


def test_equal_calls_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counted(function: Any) -> Any:
        traced.append(function)
        return make_fx(function)

    monkeypatch.setattr(autocast_effect, "make_fx", counted)

    def forward(net: Net, x: Tensor) -> Any:
        for _ in range(30):
            x = net.conv(x).relu()
        return x

    compared(forward)
    assert len(traced) == 3 + 3 + 2  # conv of float32 and of bfloat16 input; relu, where two traces are equal


CUDA_POLICIES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, list[Any]]] = {
    "low precision, twice inside": (lambda x: x @ x, FP32, ["autocast_call"]),
    "float32": (lambda x: F.layer_norm(x, (6,)), BF16, [CAST, "call"]),
    "float32 softmax": (lambda x: F.softmax(x, 1), BF16, [CAST, "call"]),
    "float32 by an argument": (lambda x: x.sum(1), BF16, ["autocast_call"]),
    "any": (F.relu, BF16, ["call"]),
}


@pytest.mark.parametrize("policy", CUDA_POLICIES)
def test_cuda_has_other_policies_that_need_no_gpu_to_find_out(policy: str) -> None:
    function, given, expected = CUDA_POLICIES[policy]
    with FakeTensorMode():
        x = torch.empty(6, 6, device="cuda", dtype=given)
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = x
    graph.output((graph.create_node("call_function", function, (node,), name="call"),))
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:  # torch.autocast("cuda") is off where there is no GPU
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", BF16)
        applied = apply_autocast(GraphModule({}, graph), [x])
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
    nodes = [n for n in applied.graph.nodes if n.op not in {"placeholder", "output"}]
    assert [n.target if n.target is CAST else n.name for n in nodes] == expected


def test_checkpointed_regions_are_cast_inside() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = checkpoint(lambda y: net.conv(y).relu(), x * 2, use_reentrant=False)
        with region(enabled=False):
            return checkpoint(net.up, y.float(), use_reentrant=False)

    result, compiler = compared(forward)
    assert result.exact(0.0), result
    assert compiler.applied is not None
    bodies = [m for name, m in compiler.applied.named_children() if name.startswith("autocast_")]
    assert [[n.target for n in body.graph.nodes].count(CAST) for body in bodies] == [3, 0]  # type: ignore[union-attr]


def test_other_subgraphs_are_refused_under_autocast_only() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y @ y.mT, lambda y: y @ y.mT * 2, (x,))

    model = Under(Net(forward), BF16)
    compiled(model)
    with pytest.raises(
        BackendCompilerFailed, match=r"(?s)autocast does to .*cond.*only those of activation checkpointing"
    ):
        model(torch.ones(2, 4, 5, 6))

    class Applied(Compiler):
        def __call__(self, gm: GraphModule, inputs: Any) -> Any:
            self.given, self.applied = gm, apply_autocast(gm, inputs)
            return self.applied

    def disabled(net: Net, x: Tensor) -> Any:
        with region(enabled=False):
            return forward(net, x)

    torch.compiler.reset()
    model, compiler = Under(Net(disabled), BF16), Applied()
    model.compile(backend=compiler, fullgraph=True, dynamic=False)
    assert model(torch.ones(2, 4, 5, 6)).dtype == FP32
    assert compiler.applied is not compiler.given


def test_a_dtype_that_the_trace_does_not_explain_is_refused_with_the_users_line() -> None:
    def forward(net: Net, x: Tensor) -> Any:
        y = net.linear(x)
        with region(FP16):  # eager mode fails here too: it finds the weight in autocast's cache, in bfloat16
            return y, net.linear(x)

    model = Under(Net(forward), BF16)
    compiled(model)
    with pytest.raises(
        BackendCompilerFailed, match=r"(?s)autocast does to .*linear.*return y, net\.linear\(x\).*enabled=False"
    ):
        model(torch.ones(2, 4, 5, 6))
    assert not torch.is_autocast_enabled("cpu")

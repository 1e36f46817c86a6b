"""Every random operator draws what eager mode draws, under every inner backend, and leaves the generator alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxshard._torch import BackendCompilerFailed
from fxshard.passes.replace_random import RANDOM
from tests.graph.random_match import SEED, Compiler, Of, assert_matches, image, step

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
BACKENDS = ["eager", "aot_eager", "inductor"]

FAMILIES: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_inplace": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "dropout_p1": lambda x: F.dropout(x, 1.0),
    "dropout_p0": lambda x: F.dropout(x, 0.0) + 1,
    "dropout_eval": lambda x: F.dropout(x, 0.3, training=False) + 1,
    "dropout1d": lambda x: F.dropout1d(x[0], 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout3d": lambda x: F.dropout3d(x[None], 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "native_dropout_p1": lambda x: torch.native_dropout(x, 1.0, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_inplace": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "attention_causal": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    "attention_math": lambda x: torch.ops.aten._scaled_dot_product_attention_math(x, x, x, None, 0.3),
    "fractional_pool": lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.7)),
    "rand": lambda x: x + torch.rand(3, 5, 7),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(3, 1, 1, dtype=torch.float64),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x + torch.randint(9, (5, 7)),
    "randint_low": lambda x: (x, torch.randint(2**60, 2**60 + 4, (5, 7))),
    "randint_like": lambda x: x * torch.randint_like(x, 9) + torch.randint_like(x, 3, 9),
    "randperm": lambda x: x[:, :, torch.randperm(5)],
    "bernoulli_of": lambda x: x + torch.bernoulli(x.sigmoid()),
    "bernoulli_only": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: x * torch.bernoulli(x.detach(), 0.3),
    "bernoulli_inplace": lambda x: x * x.new_empty((2, 1, 1, 1)).bernoulli_(0.6),
    "bernoulli_tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(-1, 2),
    "normal_inplace": lambda x: x * torch.empty_like(x).normal_(1, 2),
    "normal_sizes": lambda x: x + torch.normal(1.0, 2.0, (3, 1, 1)),
    "normal_means": lambda x: x + torch.normal(x, 2.0),
    "normal_stds": lambda x: x + torch.normal(2.0, x.abs()),
    "normal_both": lambda x: torch.normal(x, x.abs()),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "log_normal": lambda x: x * torch.empty_like(x).log_normal_(),
    "geometric": lambda x: x * torch.empty_like(x).geometric_(0.4),
    "cauchy": lambda x: x * torch.empty_like(x).cauchy_(),
    "random": lambda x: x * aten.random.to(x, 4) + aten.random.default(x),
    "poisson": lambda x: x * torch.poisson(x.abs()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 8.0), x.detach().sigmoid()),
    "multinomial": lambda x: (x, torch.multinomial(x.abs().flatten(1), 4)),
    "multinomial_replaced": lambda x: (x, torch.multinomial(x.abs().flatten(1), 40, replacement=True)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_draws_what_eager_draws(family: str, inner: str) -> None:
    assert_matches(Of(FAMILIES[family]), image(), inner)


def all_families(x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    for function in FAMILIES.values():
        result = function(x)
        found.extend([result] if isinstance(result, Tensor) else result)
    return found


@pytest.mark.nightly
def test_families_under_inductor() -> None:
    assert_matches(Of(all_families), image(), "inductor", exact=False)


@pytest.mark.parametrize("inner", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dropout_is_bitwise(dtype: torch.dtype, inner: str) -> None:
    assert_matches(nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.7)), image(dtype), inner)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_dropout_keeps_bfloat16(inner: str) -> None:
    compiler = assert_matches(nn.Dropout(0.3), image(torch.bfloat16), inner)
    assert compiler.targets().count(RANDOM) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: F.alpha_dropout(x, 0.3, training=True),
        lambda x: x * torch.empty_like(x).bernoulli_(0.3),
        lambda x: x * torch.bernoulli(x.detach(), 0.3),
        lambda x: x * torch.rand_like(x),
        lambda x: x * torch.empty_like(x).normal_(),
    ],
    ids=["dropout", "alpha_dropout", "bernoulli_inplace", "bernoulli_p", "rand_like", "normal_inplace"],
)
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced", "expanded"])
def test_strides_decide_where_a_number_lands(function: Callable[[Tensor], Any], layout: str) -> None:
    class Restrided(Of):
        def forward(self, x: Tensor) -> Any:
            x = x * self.scale
            if layout == "channels_last":
                return function(x.contiguous(memory_format=torch.channels_last))
            if layout == "transposed":
                return function(x.permute(3, 1, 0, 2))
            if layout == "sliced":
                return function(x[:, 1:, :, ::2])
            return function(x[:, :1].expand(-1, 4, -1, -1))

    assert_matches(Restrided(function), image(shape=(2, 3, 6, 8)), "aot_eager")


@pytest.mark.parametrize("inner", BACKENDS)
def test_in_place_draw_into_a_view(inner: str) -> None:
    def fill_view(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :, 1:4, ::2].uniform_()
        return y * x

    assert_matches(Of(fill_view), image(), inner)


@pytest.mark.parametrize("inner", BACKENDS)
def test_branches_draw_in_program_order(inner: str) -> None:
    def branches(x: Tensor) -> Tensor:
        small = torch.rand(3) + 1  # drawn first, used last
        large = F.dropout(x.repeat(1, 1, 8, 8), 0.5)
        tiny = torch.randn(())
        other = torch.rand_like(x) * x
        return other.sum() * tiny + large.mean() + (small * x.mean((0, 2, 3))).sum()

    assert_matches(Of(branches), image(), inner, exact=False)


@pytest.mark.parametrize("inner", BACKENDS)
def test_identical_draws_are_not_merged(inner: str) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand(4), torch.rand(4)

    compiler = assert_matches(Of(twice), image(), inner)
    assert compiler.targets().count(RANDOM) == 4


@pytest.mark.parametrize("inner", BACKENDS)
@pytest.mark.parametrize("position", ["first", "last", "only"])
def test_unused_draw_advances_the_generator(position: str, inner: str) -> None:
    def unused(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        if position != "first":
            y = y * 2 if position == "only" else F.dropout(y, 0.5)
        F.dropout(x, 0.25)
        torch.rand(5)
        return y * torch.rand_like(y) if position == "first" else y, y.mean()

    compiler = assert_matches(Of(unused), image(), inner, exact=False)
    kept = compiler.targets().count(torch.ops.fxshard.keep_draws.default)
    assert kept == (0 if position == "first" else 1)


@pytest.mark.parametrize("inner", BACKENDS)
def test_draw_without_gradients(inner: str) -> None:
    def under_no_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = F.dropout(x, 0.5) + torch.rand_like(x)
        return noise * x + torch.rand(1)

    assert_matches(Of(under_no_grad), image(), inner, exact=False)


@pytest.mark.parametrize("inner", BACKENDS)
def test_inference_advances_the_generator(inner: str) -> None:
    torch._dynamo.reset()
    model = Of(lambda x: F.dropout(x, 0.5))
    compiled = torch.compile(model, backend=Compiler(inner), fullgraph=True)
    with torch.no_grad():
        torch.manual_seed(SEED)
        expected = [model(image()) for _ in range(3)]
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        assert all(torch.equal(compiled(image()), e) for e in expected)
        assert torch.equal(torch.get_rng_state(), state)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The others draw on the CPU, or in one kernel of the GPU's own.
CUDA_FAMILIES = FAMILIES.keys() - {"rand", "randn", "randint", "randint_low", "randperm", "normal_sizes"}
CUDA_FAMILIES -= {"attention", "attention_causal"}


@needs_cuda
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", sorted(CUDA_FAMILIES))
def test_family_draws_what_eager_draws_on_cuda(family: str, inner: str) -> None:
    assert_matches(Of(FAMILIES[family]).cuda(), image().cuda(), inner)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_that_drops_in_its_kernel_is_refused_on_cuda(dtype: torch.dtype) -> None:
    x = image(dtype, (2, 3, 16, 64)).cuda()
    with pytest.raises(BackendCompilerFailed, match=r"SDPBackend\.MATH"):
        assert_matches(Of(FAMILIES["attention"]).cuda(), x, "eager")


@needs_cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor's advice for float32 products
@pytest.mark.parametrize("inner", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_attention_made_of_operators_on_cuda(dtype: torch.dtype, inner: str) -> None:
    x = image(dtype, (2, 3, 16, 64)).cuda()
    with sdpa_kernel(SDPBackend.MATH):
        assert_matches(Of(FAMILIES["attention"]).cuda(), x, inner, exact=inner != "inductor")


@needs_cuda
@pytest.mark.parametrize("inner", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 4, 16, 64), (3, 8, 129, 64)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "offset"])
def test_fused_dropout_on_cuda(layout: str, shape: tuple[int, ...], dtype: torch.dtype, inner: str) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if layout == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            if layout == "sliced":
                x = x[:, :, ::2]
            if layout == "offset":
                x = x.flatten()[1:]
            return F.dropout(F.dropout(x, 0.3), 0.7)

    exact = inner != "inductor" or dtype != torch.bfloat16  # inductor computes bfloat16 in float32
    assert_matches(Twice(), image(dtype, shape).cuda(), inner, exact=exact)


class Residual(nn.Module):
    """A block with timm's stochastic depth, batch norm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        timm_layers = pytest.importorskip("timm.layers")
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout2d(0.2))
        self.drop_path = timm_layers.DropPath(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop_path(self.body(x))
        return out


@pytest.mark.parametrize("inner", BACKENDS)
def test_timm_drop_path(inner: str) -> None:
    model = nn.Sequential(Residual(3), nn.Dropout(0.1), Residual(3)).double()
    assert_matches(model, image(torch.float64, (5, 3, 6, 8)), inner, exact=False)


def test_backward_uses_the_mask_of_the_forward() -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.Dropout(0.5), backend=Compiler("inductor"), fullgraph=True)
    x = torch.ones(64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert 0 < (y != 0).sum() < 64
    assert x.grad is not None
    assert torch.equal(y, x.grad)


def test_zero_gradient_of_given_tensors_as_in_eager() -> None:
    outcome = step(model := Of(lambda x: torch.bernoulli(x.sigmoid())), model, image())
    assert outcome.input_gradient is not None
    assert not outcome.input_gradient.any()

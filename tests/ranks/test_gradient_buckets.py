"""Gradient buckets on ranks: how many sums, when they start, and that they change nothing but rounding."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard import backend
from fxshard.api import transform
from fxshard.compare import Case, transformed
from fxshard.errors import PlanError
from fxshard.ops import Traffic
from fxshard.report import describe
from fxshard.trace import build_model, cotangent_loss
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

MEGABYTE = 2**20
NAMES = {
    torch.ops._c10d_functional.all_reduce.default: "sum",
    torch.ops._c10d_functional.wait_tensor.default: "wait",
    torch.ops.aten.convolution_backward.default: "conv",
}


class Order(TorchDispatchMode):
    """Notes sums, waits and convolutions in the order in which they run, and what travels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sent: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NAMES:
            self.names.append(NAMES[func])
        if NAMES.get(func) == "sum":
            self.sent.append((args[0].dtype, args[0].nbytes))
        return func(*args, **(kwargs or {}))


def atto() -> tuple[nn.Module, tuple[Tensor]]:
    import timm

    return timm.create_model("convnext_atto", num_classes=5), (torch.randn(1, 3, 32, 64),)


def chain(channels: int = 8, depth: int = 6) -> tuple[nn.Module, tuple[Tensor]]:
    layers = [nn.Conv2d(channels, channels, 1) for _ in range(depth)]
    return nn.Sequential(*layers), (torch.randn(2, channels, 6, 10),)


def run_backward(rank: int, case: Case) -> tuple[list[str], list[tuple[torch.dtype, int]], int]:
    """Return what a backward did, what it summed, and the bytes of all parameters (in a rank process)."""
    model, inputs = build_model(case)
    loss = cotangent_loss(transformed(model, case)(*inputs))
    with Order() as order:
        loss.backward()
    return order.names, order.sent, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("cap", "inner_backend"), [(1, "eager"), pytest.param(4, "aot_eager", marks=pytest.mark.nightly)]
)
def test_gradients_take_no_more_sums_than_their_size_needs(pool: RankPool, cap: int, inner_backend: str) -> None:
    case = Case(atto, inner_backend=inner_backend, options={"bucket_cap_mb": cap})
    for _, sent, parameters in pool.run(run_backward, case, ranks=2):
        large = [size for _, size in sent if size > 10_000]  # a few small sums are of statistics
        assert sum(large) == pytest.approx(parameters, rel=0.01)
        assert len(sent) <= math.ceil(parameters / (cap * MEGABYTE)) + 2


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
def test_sums_start_as_gradients_come_and_are_waited_for_last(pool: RankPool, inner_backend: str) -> None:
    layer_mb = (8 * 8 + 8) * 8 / MEGABYTE
    case = Case(chain, inner_backend=inner_backend, options={"bucket_cap_mb": 2 * layer_mb})
    for names, _, _ in pool.run(run_backward, case, ranks=2):
        assert "".join(name[0] for name in names) == "ccs" * 3 + "www"


@pytest.mark.parametrize("inner_backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_a_bucket_over_two_mesh_axes_is_one_sum(pool: RankPool, inner_backend: str) -> None:
    case = Case(chain, (Shard(2), Shard(3)), (2, 2), inner_backend=inner_backend)
    assert_exact(pool, case)
    for names, _, _ in pool.run(run_backward, case, ranks=4):
        assert Counter(names) == {"conv": 6, "sum": 1, "wait": 1}


def test_gradients_are_summed_in_the_type_that_is_asked_for(pool: RankPool) -> None:
    case = Case(chain, options={"reduce_dtype": torch.float32})
    for _, sent, parameters in pool.run(run_backward, case, ranks=2):
        assert sent == [(torch.float32, parameters // 2)]
    for of_image, of_parameters in pool.run(largest_errors, case, ranks=2):
        assert of_image < 1e-12  # not summed
        assert 1e-12 < of_parameters < 1e-5  # float32's rounding, in a float64 model


def largest_errors(rank: int, case: Case) -> tuple[float, float]:
    """Return how far the image's and the parameters' gradients are from the untouched model's (in a rank process)."""
    model, inputs = build_model(case)
    assert isinstance(inputs, tuple)
    return errors(model, transformed(model, case), inputs[0])


def errors(model: nn.Module, net: Callable[[Tensor], Tensor], image: Tensor) -> tuple[float, float]:
    """Return the largest relative errors of the image's and the parameters' gradients; ``net`` shares the latter."""
    found = []
    for call in (model, net):
        model.zero_grad()
        leaf = image.detach().clone().requires_grad_()
        cotangent_loss(call(leaf)).backward()
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    of = [float((e - g).abs().max() / e.abs().max()) for e, g in zip(*found, strict=True)]  # none may be missing
    return of[0], max(of[1:])


def predicted(rank: int, case: Case) -> Traffic:
    """Return what the report says that gradients send (in a rank process)."""
    found: list[Traffic] = []
    observe = lambda *graphs: found.append(describe(*graphs).total.backward["gradient"])  # noqa: E731
    backend.on_compiled.append(observe)
    try:
        model, inputs = build_model(case)
        transformed(model, case)(*inputs)
    finally:
        backend.on_compiled.remove(observe)
    return found[0]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"reduce_dtype": torch.float32}], ids=str)
def test_the_report_says_what_is_sent(pool: RankPool, options: dict[str, Any]) -> None:
    case = Case(chain, (Shard(2), Shard(3)), (2, 2), options=options)
    measured = [sent for _, sent, _ in pool.run(run_backward, case, ranks=4)]
    for report, sent in zip(pool.run(predicted, case, ranks=4), measured, strict=True):
        assert report == Traffic(len(sent), sum(size for _, size in sent))


class Heads(nn.Module):
    """A body with two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.near, self.far = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x).relu()
        return self.near(y), self.far(y)


def heads() -> tuple[nn.Module, tuple[Tensor]]:
    return Heads(), (torch.randn(2, 3, 6, 10),)


def first_head(outputs: Any) -> Tensor:
    loss: Tensor = outputs[0].square().sum()
    return loss


def test_a_parameter_that_the_loss_does_not_use_has_no_gradient(pool: RankPool) -> None:
    assert_exact(pool, Case(heads, loss=first_head))


def channels_last() -> tuple[nn.Module, tuple[Tensor]]:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 2)).to(memory_format=torch.channels_last)
    return net, (torch.randn(2, 3, 6, 10),)


def strides(rank: int, case: Case) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the strides of each parameter and of its gradient (in a rank process)."""
    model, inputs = build_model(case)
    cotangent_loss(transformed(model, case)(*inputs)).backward()
    return [(p.stride(), p.grad.stride()) for p in model.parameters() if p.grad is not None]


def test_a_gradient_lies_in_memory_as_its_parameter_does(pool: RankPool) -> None:
    assert_exact(pool, Case(channels_last))
    for found in pool.run(strides, Case(channels_last), ranks=2):
        assert len(found) == 4
        assert all(parameter == gradient for parameter, gradient in found)


class Twice(nn.Module):
    """Calls one network twice, the second time on what the first returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.net(x).tanh())
        return y


def outside(rank: int, case: Case) -> float:
    """Return the error of gradients where the transformed network is called twice before the backward."""
    model, inputs = build_model(case)
    assert isinstance(model, Twice)
    assert isinstance(inputs, tuple)
    net = transformed(model.net, case)
    return max(errors(model, lambda x: net(net(x).tanh()), inputs[0]))


def twice() -> tuple[nn.Module, tuple[Tensor]]:
    return Twice(), (torch.randn(2, 3, 6, 10),)


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
def test_two_calls_before_one_backward(pool: RankPool, inner_backend: str) -> None:
    assert max(pool.run(outside, Case(twice, inner_backend=inner_backend), ranks=2)) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bucket_cap_mb": -1}, "bucket_cap_mb=-1 is no size"), ({"reduce_dtype": "half"}, "is no floating dtype")],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        transform(nn.Conv2d(1, 1, 1), **options)

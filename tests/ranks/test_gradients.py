"""Gradients reach everything: each kind of parameter, the input, and nothing that is frozen, detached or in no_grad.

A gradient that misses one edge, such as a layer-scale that is reshaped before use, looks plausible and is wrong;
so every kind stands in a small model between two convolutions whose gradients depend on it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard.compare import Case, transformed
from fxshard.trace import build_model
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

CHANNELS = 4


def conv(kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2, **options)


class Between(nn.Module):
    """A part between two convolutions."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.after = conv(), part, conv(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.gelu(self.part(self.before(x))))


class LayerScale(nn.Module):
    """A parameter per channel, reshaped before it scales a residual (torchvision's and timm's ConvNeXt)."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.branch = nn.Parameter(torch.randn(CHANNELS)), conv()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x).mul(self.gamma.reshape(1, -1, 1, 1))


class UsedTwice(nn.Module):
    """One weight in two convolutions of different dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = conv()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.shared(x))
        return F.conv2d(y, self.shared.weight, self.shared.bias, padding=2, dilation=2)


class SplitAndWhole(nn.Module):
    """A parameter on the split map and on its global mean: the gradient is summed on one edge only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3)) * self.scale
        return x * self.scale[:, None, None] + pooled.sigmoid()[:, :, None, None]


class Position(nn.Module):
    """A parameter as wide as the map: each rank has the gradient of its own columns."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(height, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Pixels(nn.Module):
    """Layers over channels-last pixels."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y


class Gate(nn.Module):
    """Squeeze and excitation: whole work between two pieces of split work."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(CHANNELS, 2, 1), nn.Linear(2, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))).flatten(1)
        return x * self.excite(y).sigmoid()[:, :, None, None]


class Of(nn.Module):
    """A function with a convolution and a normalisation of its own."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.inner, self.norm = function, conv(), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


SIZE = (9, 13)

KINDS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv,
    "conv-no-bias": lambda: conv(bias=False),
    "conv-depthwise": lambda: conv(7, groups=CHANNELS),
    "batch-norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group-norm": lambda: nn.GroupNorm(2, CHANNELS),
    "instance-norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "layer-norm": lambda: Pixels(nn.LayerNorm(CHANNELS)),
    "linear": lambda: Pixels(nn.Linear(CHANNELS, 6), nn.GELU(), nn.Linear(6, CHANNELS)),
    "layer-scale": LayerScale,
    "used-twice": UsedTwice,
    "split-and-whole": SplitAndWhole,
    "position": lambda: Position(*SIZE),
    "gate": Gate,
    "prelu": lambda: nn.PReLU(CHANNELS),
    "frozen-weight": lambda: frozen(conv(), "weight"),
    "frozen-batch-norm": lambda: frozen(nn.BatchNorm2d(CHANNELS), "weight", "bias"),
    "frozen-layer-scale": lambda: frozen(LayerScale(), "gamma"),
}


def build(part: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Between({**KINDS, **REGIONS, **IN_PLACE}[part]()), (torch.randn(2, CHANNELS, *SIZE),)


@pytest.mark.parametrize(("ranks", "dim"), [(2, 2), (3, 3)], ids=["H-2", "W-3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_every_kind_of_parameter_and_the_input(
    pool: RankPool, kind: str, ranks: int, dim: int
) -> None:
    assert_exact(pool, Case(partial(build, kind), (Shard(dim),), (ranks,)))


def _no_grad_branch(m: Of, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.inner(x).mean((2, 3), keepdim=True).sigmoid()
    return m.norm(x) * gate + m.inner(x)


def _no_grad_weight(m: Of, x: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = m.inner.weight / m.inner.weight.norm()
    return F.conv2d(x, scaled, m.inner.bias, padding=1) + m.norm(x)


def _detached_target(m: Of, x: Tensor) -> Tensor:
    return m.norm(x) * m.inner(x.detach()) + m.inner(x).detach()


def _straight_through(m: Of, x: Tensor) -> Tensor:
    y = m.inner(x)
    return y + (y.round() - y).detach()


def _grad_in_no_grad(m: Of, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.norm(x)
        with torch.enable_grad():
            z = m.inner(x)
    return y + z


REGIONS: dict[str, Callable[[], nn.Module]] = {
    "no-grad-branch": lambda: Of(_no_grad_branch),
    "no-grad-weight": lambda: Of(_no_grad_weight),
    "detached-target": lambda: Of(_detached_target),
    "straight-through": lambda: Of(_straight_through),
    "enable-grad-in-no-grad": lambda: Of(_grad_in_no_grad),
}


@pytest.mark.parametrize("region", REGIONS)
def test_no_grad_and_detach_cut_the_gradient_where_the_model_does(pool: RankPool, region: str) -> None:
    assert_exact(pool, Case(partial(build, region), mesh_shape=(3,)))


def _slice_write(m: Of, x: Tensor) -> Tensor:
    y = m.inner(x)
    y[:, 1:3] *= 0.5
    y[:, :, 2:5] += x[:, :, 2:5]
    return y


def _column_write(m: Of, x: Tensor) -> Tensor:
    y = m.inner(x)
    y[..., 3:9] = m.norm(x)[..., 2:8]
    return y


def _masked(m: Of, x: Tensor) -> Tensor:
    return m.inner(x).masked_fill_(x > 0.5, 0.25).clamp_(-1, 1)


def _counter(m: Of, x: Tensor) -> Tensor:
    assert m.norm.running_mean is not None
    m.norm.running_mean.mul_(0.9).add_(m.inner(x).detach().mean((0, 2, 3)), alpha=0.1)
    return x * m.norm.running_mean[:, None, None] + m.inner(x)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu_": lambda: nn.Sequential(nn.ReLU(inplace=True), conv(), nn.ReLU6(inplace=True)),
    "add_mul_": lambda: Of(lambda m, x: m.inner(x).add_(x).mul_(m.norm(x))),
    "slice-write": lambda: Of(_slice_write),
    "column-write": lambda: Of(_column_write),
    "masked-fill_": lambda: Of(_masked),
    "buffer-average": lambda: Of(_counter),
}


@pytest.mark.parametrize("code", IN_PLACE)
def test_in_place_code_is_right(pool: RankPool, code: str) -> None:
    assert_exact(pool, Case(partial(build, code), mesh_shape=(2,)), gathers=None)


class Communication(TorchDispatchMode):
    """Counts calls of fxshard's operators, and the sums of gradients that are started."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fxshard" or func is torch.ops._c10d_functional.all_reduce.default:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Backward:
    """What a backward ran, and which parameters have a gradient."""

    calls: Counter[str]
    trained: frozenset[str]


def run_backward(rank: int, case: Case, input_gradient: bool) -> Backward:
    torch.compiler.reset()
    model, inputs = build_model(case)
    assert isinstance(inputs, tuple)
    net = transformed(model, case)
    loss = net(inputs[0].requires_grad_(input_gradient)).sum()
    with Communication() as counted:
        loss.backward()
    return Backward(counted.calls, frozenset(n for n, p in model.named_parameters() if p.grad is not None))


@pytest.mark.parametrize(
    ("kind", "all_reduces"),
    # four of the convolutions around; the whole image's mean needs none
    [("conv", 6), ("frozen-weight", 5), ("layer-scale", 7), ("frozen-layer-scale", 6), ("used-twice", 6)],
)
def test_a_trained_parameter_is_summed_once_and_a_frozen_one_never(pool: RankPool, kind: str, all_reduces: int) -> None:
    case = Case(partial(build, kind), options={"bucket_cap_mb": 0})
    for found in pool.run(run_backward, case, True, ranks=2):
        assert found.calls["all_reduce"] == all_reduces
        assert len(found.trained) == all_reduces
    for found in pool.run(run_backward, replace(case, options={}), True, ranks=2):
        assert (found.calls["all_reduce"], len(found.trained)) == (1, all_reduces)


def only_after_is_trained() -> tuple[nn.Module, tuple[Tensor]]:
    model, inputs = build("conv")
    return frozen(model, "before.weight", "before.bias", "part.weight", "part.bias"), inputs


def test_a_frozen_front_sends_no_gradient_of_halos_or_of_the_input(pool: RankPool) -> None:
    for found in pool.run(run_backward, Case(only_after_is_trained), False, ranks=2):
        assert found.calls == {"slice": 1, "all_reduce": 1}  # the output's gradient is cut, two parameters are summed
        assert found.trained == {"after.weight", "after.bias"}

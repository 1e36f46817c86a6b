"""What a training script relies on besides operators: second derivatives, memory formats, modes, containers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrize

from fxshard.compare import Case, difference, transformed
from fxshard.ops.memory import CHANNELS_LAST, memory_order
from fxshard.trace import Step, Trace, build_model
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fxshard.workers import RankPool

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda channels: nn.GroupNorm(2, channels),
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
}


def critic(norm: str) -> tuple[nn.Module, tuple[Tensor]]:
    layers = [nn.Conv2d(3, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 6, 4, 2, 1, bias=False), NORMS[norm](6)]
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, padding=1)), (torch.randn(2, 3, 18, 37),)


def penalised(net: nn.Module, model: nn.Module, image: Tensor) -> Step:
    """Return the gradients of a WGAN-GP critic's loss: the norm of its input gradient is part of it."""
    model.zero_grad()
    image = image.detach().requires_grad_()
    scores = net(image)
    (slope,) = torch.autograd.grad(scores.square().mean((1, 2, 3)).sum(), image, create_graph=True)
    ((slope.flatten(1).norm(dim=1) - 1).square().mean() + scores.mean()).backward()
    parameters = {name: p.grad for name, p in model.named_parameters()}
    return Step({"scores": scores.detach()}, {"image": image.grad}, parameters, {}, {})


def penalise(rank: int, case: Case) -> str:
    """Return how the penalised gradients differ, or nothing; or what was raised (in a rank process)."""
    model, inputs = build_model(case)
    image: Tensor = inputs[0]  # type: ignore[index]
    expected = penalised(model, model, image)
    try:
        found = penalised(transformed(model, case), model, image)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    differs = difference(Trace((expected,)), Trace((found,)))
    return "" if differs.exact() else str(differs)


@pytest.mark.parametrize(("norm", "ranks"), [("group", 2), ("group", 3), ("batch", 3), ("instance", 2)])
def test_a_gradient_penalty_is_exact_under_eager(pool: RankPool, norm: str, ranks: int) -> None:
    assert pool.run(penalise, Case(partial(critic, norm), mesh_shape=(ranks,)), ranks=ranks) == [""] * ranks


def test_a_second_derivative_through_aot_autograd_is_refused(pool: RankPool) -> None:
    for message in pool.run(penalise, Case(partial(critic, "group"), inner_backend="aot_eager"), ranks=2):
        assert "does not currently support double backward" in message


class Recorder(fx.Interpreter):
    """Runs a graph and records the memory order of every map in it."""

    orders: ClassVar[list[tuple[str, tuple[int, ...]]]] = []

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op == "call_function" and isinstance(made, Tensor) and made.dim() > 3 and min(made.shape) > 1:
            self.orders.append((n.name, memory_order(made)))
        return made


def recorded(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """Run a graph as it is, recorded: a Dynamo backend."""
    return Recorder(gm).run


def in_channels_last(kind: str) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model and an image in channels_last, or channels_last_3d."""
    if kind == "volume":
        layers: Sequence[nn.Module] = (nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.MaxPool3d(3, 2, 1))
        image = torch.randn(2, 3, 6, 9, 14)
        layers = (*layers, nn.Conv3d(4, 4, 3, padding=1))
    else:
        image = torch.randn(2, 3, 14, 26)
        padded = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        front = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), padded)
        middle = (nn.GroupNorm(2, 8), nn.GELU(), nn.AvgPool2d(3, 1, 1), nn.Upsample(scale_factor=2))
        layers = (*front, *middle, nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(8, 4, 5, 2, 2))
    memory_format, _ = CHANNELS_LAST[image.dim()]
    model: nn.Module = nn.Sequential(*layers).to(memory_format=memory_format)
    return model, (image.contiguous(memory_format=memory_format),)


@dataclass(frozen=True)
class Orders:
    """The memory orders that a rank saw.

    Args:
        local: Of each map in the local graph, as it ran.
        outputs: Of the untouched model's output and of the sharded one's.
        gradients: Of their input gradients.
    """

    local: list[tuple[str, tuple[int, ...]]]
    outputs: tuple[tuple[int, ...], ...]
    gradients: tuple[tuple[int, ...], ...]


def record_orders(rank: int, case: Case) -> Orders:
    """Return the memory orders of a forward and of its input gradient (in a rank process)."""
    model, inputs = build_model(case)
    image: Tensor = inputs[0]  # type: ignore[index]
    if case.inner_backend not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(recorded, name=case.inner_backend)
    Recorder.orders.clear()
    outputs, gradients = [], []
    for net in (model, transformed(model, case)):
        leaf = image.detach().requires_grad_()
        made = net(leaf)
        made.square().sum().backward()
        assert leaf.grad is not None
        outputs.append(memory_order(made))
        gradients.append(memory_order(leaf.grad))
    return Orders(list(Recorder.orders), tuple(outputs), tuple(gradients))


@pytest.mark.parametrize("kind", ["image", "volume"])
def test_channels_last_is_kept(pool: RankPool, kind: str) -> None:
    # float32: one device's own float64 convolution of a volume is contiguous on CPU
    dims = 5 if kind == "volume" else 4
    order = CHANNELS_LAST[dims][1]
    case = Case(partial(in_channels_last, kind), inner_backend="fxshard_tests_orders", dtype=torch.float32)
    for found in pool.run(record_orders, case, ranks=2):
        maps = [(name, other) for name, other in found.local if len(other) == dims]
        assert len(maps) > dims
        assert [name for name, other in maps if other != order] == []
        assert found.outputs == found.gradients == (order, order)


class Mean(nn.Module):
    """A batch norm between convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Conv2d(3, 4, 3, padding=1), norm, nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(F.relu(self.norm(self.before(x))))
        return y


AVERAGING: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm2d(4, momentum=None),
    "without-affine": lambda: nn.BatchNorm2d(4, momentum=None, affine=False),
    "not-tracking": lambda: nn.BatchNorm2d(4, momentum=None, track_running_stats=False),
}


def averaging(kind: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mean(AVERAGING[kind]()), (torch.randn(2, 3, 9, 14),)


@pytest.mark.parametrize("kind", AVERAGING)
def test_running_statistics_that_average_over_all_batches(pool: RankPool, kind: str) -> None:
    assert_exact(pool, Case(partial(averaging, kind), mesh_shape=(3,), steps=3))


class Reparametrised(nn.Module):
    """A convolution whose weight is made in its forward from three kernels and a batch norm (RepVGG)."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.randn(4, 4, 5, 5)), nn.Parameter(torch.randn(4, 4, 1, 1))
        self.scale, self.norm = nn.Parameter(torch.rand(4) + 0.5), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        centred = self.large - self.large.mean((1, 2, 3), keepdim=True)
        weight = centred / (centred.flatten(1).std(1)[:, None, None, None] + 1e-5) + F.pad(self.small, [2, 2, 2, 2])
        y: Tensor = self.norm(F.conv2d(x, weight * self.scale[:, None, None, None], padding=2))
        return y


class Symmetric(nn.Module):
    """Makes a kernel equal to its mirror image."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(-1)) / 2


def parametrised() -> nn.Module:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    parametrize.register_parametrization(conv, "weight", Symmetric())
    return conv


MADE_WEIGHTS: dict[str, Callable[[], nn.Module]] = {"reparametrised": Reparametrised, "parametrised": parametrised}


def with_made_weights(kind: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mean(MADE_WEIGHTS[kind]()), (torch.randn(2, 3, 9, 14),)


@pytest.mark.parametrize("kind", MADE_WEIGHTS)
def test_weights_that_are_made_in_the_forward(pool: RankPool, kind: str) -> None:
    assert_exact(pool, Case(partial(with_made_weights, kind), mesh_shape=(3,)))


class Pair(NamedTuple):
    """A named tuple of outputs."""

    coarse: Tensor
    scale: float


@dataclass
class Outputs:
    """A dataclass of outputs."""

    fine: Tensor
    extra: dict[str, Any]


class Pyramid(nn.Module):
    """Images of three resolutions in, a dataclass of a dict, a list and a named tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, images: dict[str, Any], weights: tuple[Tensor, float]) -> Outputs:
        small, large = images["small"], images["large"]
        fine, middle, coarse = (stem(x) for stem, x in zip(self.stems, [large, *small], strict=True))
        middle = middle + F.interpolate(coarse, size=middle.shape[-2:], mode="bilinear")
        fine = fine + F.interpolate(middle, size=fine.shape[-2:]) * weights[0][:, None, None]
        levels = [self.head(middle), self.head(coarse)]
        pair = Pair(coarse * weights[1], weights[1])
        return Outputs(self.head(fine), {"levels": levels, "pair": pair, "mean": fine.mean(), "none": None})


def pyramid() -> tuple[nn.Module, tuple[Any, ...]]:
    images = {"large": torch.randn(2, 3, 18, 29), "small": [torch.randn(2, 3, 9, 14), torch.randn(2, 3, 5, 7)]}
    return Pyramid(), (images, (torch.randn(4), 0.5))


def test_inputs_of_several_resolutions_and_nested_outputs(pool: RankPool) -> None:
    assert_exact(pool, Case(pyramid, mesh_shape=(3,)))
    assert_exact(pool, Case(pyramid, (Shard(2), Shard(3)), (2, 2), steps=1))


def infer(rank: int, case: Case) -> tuple[bool, bool, str]:
    """Return whether inference mode gives inference tensors, the untouched model's values, and the type (in a rank)."""
    model, inputs = build_model(case)
    with torch.inference_mode():
        expected, found = model(*inputs), transformed(model, case)(*inputs)
    equal = torch.allclose(found.fine, expected.fine, rtol=1e-9, atol=1e-12)
    return found.fine.is_inference(), equal, type(found).__name__


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
def test_inference_mode(pool: RankPool, inner_backend: str) -> None:
    case = Case(pyramid, inner_backend=inner_backend, training=False)
    assert pool.run(infer, case, ranks=2) == [(True, True, "Outputs")] * 2


class Camera(nn.Module):
    """Normalises the bytes of a camera in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv(image.to(self.conv.weight.dtype) / 255)
        return y if mask is None else y * mask


def build_camera() -> tuple[nn.Module, tuple[Tensor]]:
    return Camera(), (torch.randint(0, 256, (2, 3, 7, 22), dtype=torch.uint8),)


@pytest.mark.parametrize("placements", [None, (Shard(3),)], ids=["chosen", "asked"])
def test_bytes_of_a_camera_are_an_image(pool: RankPool, placements: tuple[Shard, ...] | None) -> None:
    assert assert_exact(pool, Case(build_camera, placements)).split

"""A ``torch.autograd.Function`` of the user's own: its backward runs, split like its forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils.checkpoint import checkpoint

from fxshard.compare import Case, transformed
from fxshard.trace import build_model
from fxshard.workers import WorkerError
from tests.ranks.checks import assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

CHANNELS = 4


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Odd(torch.autograd.Function):
    """Saves two tensors; its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.tanh() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 3 * gradient * scale, (gradient * x).sum((0, 2, 3), keepdim=True)


class Clipped(torch.autograd.Function):
    """The identity; the gradient is scaled to norm 1 at most, over the whole image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (ctx.limit / gradient.norm()).clamp(max=1.0), None


class Several(torch.autograd.Function):
    """A map, its sum and integers; the map's gradient uses both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        largest = x.argmax(1, keepdim=True)
        ctx.mark_non_differentiable(largest)
        return x * scale, x.sum(), largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        of_map, of_sum, _ = gradients
        return of_map * 2 + of_sum * x, (of_map * x).sum((0, 2, 3), keepdim=True) + of_sum


class Blurred(torch.autograd.Function):
    """A depthwise blur whose gradient is another blur: the backward has a halo of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.conv2d(x, x.new_ones(CHANNELS, 1, 3, 3), padding=1, groups=CHANNELS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return F.avg_pool2d(gradient, 5, 1, 2)


class Drawing(torch.autograd.Function):
    """Draws random numbers in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Convolved(torch.autograd.Function):
    """A convolution with torch's own gradients, for which there is no rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = conv2d_input(x.shape, weight, gradient, padding=1)
        return of_x, conv2d_weight(x, weight.shape, gradient, padding=1)


class Around(nn.Module):
    """A function of a map and a parameter between two convolutions."""

    def __init__(self, function: Callable[[Around, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.function(self, self.before(x)))
        return y


def _several(m: Around, x: Tensor) -> Tensor:
    scaled, total, largest = Several.apply(x, m.scale)
    return scaled * m.scale + total.tanh() + largest


def _checkpointed(m: Around, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: F.gelu(Odd.apply(x.sin(), m.scale)), x, use_reentrant=False)
    return y


def _in_no_grad(m: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = Odd.apply(x, m.scale)
    return x + gate


FUNCTIONS: dict[str, Callable[[Around, Tensor], Any]] = {
    "straight-through": lambda m, x: StraightThrough.apply(x),
    "saved": lambda m, x: Odd.apply(x, m.scale),
    "clipped": lambda m, x: Clipped.apply(x, 0.5),
    "several-outputs": _several,
    "halo-in-the-backward": lambda m, x: Blurred.apply(x),
    "of-a-parameter": lambda m, x: x * StraightThrough.apply(m.scale * 4),
    "twice": lambda m, x: StraightThrough.apply(Odd.apply(x, m.scale) * 3) + Odd.apply(x, m.scale),
    "checkpointed": _checkpointed,
    "no-grad": _in_no_grad,
    "convolution": lambda m, x: Convolved.apply(x, m.scale.reshape(2, 2, 1, 1).repeat(2, 2, 3, 3)),
}
TRACED = ("saved", "several-outputs", "halo-in-the-backward", "checkpointed")
GATHERED = {"convolution": "no rule for aten.convolution_backward.default"}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Around(FUNCTIONS[name]), (torch.randn(2, 3, 9, 14),)


def drawing() -> tuple[nn.Module, tuple[Tensor]]:
    return Around(lambda m, x: Drawing.apply(x)), (torch.randn(2, 3, 9, 14),)


ROWS = [*((name, "eager") for name in FUNCTIONS), *((name, "aot_eager") for name in TRACED)]


@pytest.mark.parametrize(("name", "inner_backend"), ROWS)
def test_the_user_s_backward_runs_split(pool: RankPool, name: str, inner_backend: str) -> None:
    case = Case(partial(build, name), (Shard(3),), (3,), inner_backend)
    verdict = assert_exact(pool, case, gathers=name in GATHERED)
    assert verdict.reasons == ((GATHERED[name],) if name in GATHERED else ())


def test_the_user_s_backward_runs_split_on_two_axes(pool: RankPool) -> None:
    assert_exact(pool, Case(partial(build, "saved"), (Shard(2), Shard(3)), (2, 2)))


def test_a_backward_that_draws_is_refused(pool: RankPool) -> None:
    with pytest.raises(WorkerError, match="draws random numbers in the backward") as refusal:
        pool.run(judge, [Case(drawing)], ranks=2)
    assert {cause.type_name for cause in refusal.value.causes.values()} == {"CaptureError"}


def differentiate_twice(rank: int, case: Case) -> str:
    """Return what torch says to a second derivative of a custom function (in a rank process)."""
    model, inputs = build_model(case)
    x = inputs[0].requires_grad_()  # type: ignore[index]
    (gradient,) = torch.autograd.grad(transformed(model, case)(x).square().sum(), x, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_of_a_custom_function_is_refused(pool: RankPool) -> None:
    for message in pool.run(differentiate_twice, Case(partial(build, "saved")), ranks=2):
        assert "once_differentiable" in message

"""Writes that autograd does not see: in no_grad or through ``.data``, to parameters, activations and inputs.

What is written keeps the history that it had, so its gradient goes where it went before; a write that autograd does
see gives the tensor a new history, also in the hands of the caller.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fxshard.api import transform
from fxshard.compare import Case, Difference, compare_models, transformed
from fxshard.errors import FxShardError
from fxshard.workers import mesh
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

CHANNELS, HEIGHT, WIDTH = 4, 6, 13
BACKENDS = ("eager", "aot_eager")


class Writing(nn.Module):
    """A function between two convolutions, with parameters to write to."""

    def __init__(self, function: Callable[[Writing, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.inner, self.after = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1))
        self.table = nn.Parameter(torch.randn(HEIGHT, WIDTH))
        self.register_buffer("mask", (torch.arange(9).reshape(3, 3) < 5).double())
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self, self.before(x)).sin())


def masked_weight(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.inner.weight.mul_(m.mask)
    return m.inner(x)


def twice_written(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.mul_(0.9)
    y = x + m.scale
    with torch.no_grad():
        m.scale.copy_(m.scale + 0.3)
    return y * m.scale


def data_written(m: Writing, x: Tensor) -> Tensor:
    m.inner.weight.data.mul_(0.9)
    return m.inner(x)


def data_assigned(m: Writing, x: Tensor) -> Tensor:
    m.inner.weight.data *= m.mask
    m.scale.data += 0.3
    return m.inner(x) * m.scale


def row_written(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.inner.weight[1] = 0.25
        m.inner.weight[2].mul_(0.5)
    return m.inner(x)


def renormed(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        rows = m.inner.weight.flatten(1)
        rows.div_(rows.norm(dim=1, keepdim=True))
    return m.inner(x)


def viewed_before(m: Writing, x: Tensor) -> Tensor:
    weight, kept = m.inner.weight.flip(0), m.inner.weight.flatten(1)
    with torch.no_grad():
        m.inner.weight.mul_(0.9)
    return F.conv2d(x, weight, padding=1) + kept.sum(1)[:, None, None] + m.inner.weight.detach().mean()


def statistic_written(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.mul_(0.5).add_(x.mean((0, 2, 3))[:, None, None], alpha=0.5)
    return x * m.scale


def map_written(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.table.clamp_(-0.5, 0.5)
    return x + m.table


def clamped(m: Writing, x: Tensor) -> Tensor:
    y = m.inner(x)
    with torch.no_grad():
        y.clamp_(-0.3, 0.3)
    return y * m.scale


def rounded(m: Writing, x: Tensor) -> Tensor:
    y = m.inner(x)
    y.data.mul_(4).round_().div_(4)
    return y * m.scale


def columns_written(m: Writing, x: Tensor) -> Tensor:
    y = m.inner(x)
    with torch.no_grad():
        y[..., 3:9] = 0.5
    return y.add_(m.scale)


def views_written(m: Writing, x: Tensor) -> Tensor:
    y = m.inner(x)
    a, b = y[:, :2], y[:, 2:]
    del y
    with torch.no_grad():
        a.mul_(0.5)
        b.add_(a)
    return torch.cat([b, a], 1)


def seen_then_hidden(m: Writing, x: Tensor) -> Tensor:
    y = m.inner(x)
    y.add_(m.scale)
    with torch.no_grad():
        y.clamp_(-0.3, 0.3)
    return y.mul(m.scale)


def in_checkpoint(m: Writing, x: Tensor) -> Tensor:
    return checkpoint(partial(masked_weight, m), x, use_reentrant=False) * m.scale


WRITES: dict[str, Callable[[Writing, Tensor], Tensor]] = {
    "masked-weight": masked_weight,
    "twice-written": twice_written,
    "data-written": data_written,
    "data-assigned": data_assigned,
    "row-written": row_written,
    "renormed": renormed,
    "viewed-before": viewed_before,
    "statistic-written": statistic_written,
    "map-written": map_written,
    "clamped": clamped,
    "rounded": rounded,
    "columns-written": columns_written,
    "views-written": views_written,
    "seen-then-hidden": seen_then_hidden,
    "in-checkpoint": in_checkpoint,
}


def build(write: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Writing(WRITES[write]), (torch.randn(2, CHANNELS, HEIGHT, WIDTH),)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_unseen_keeps_its_gradient(pool: RankPool, write: str, backend: str) -> None:
    assert_exact(pool, Case(partial(build, write), inner_backend=backend, steps=3), gathers=None)


def test_a_mesh_of_two_axes_and_no_gradients(pool: RankPool) -> None:
    case = Case(partial(build, "masked-weight"), (Shard(2), Shard(3)), (2, 2))
    assert_exact(pool, case)
    assert_exact(pool, replace(case, no_grad=True, training=False))


class Caller(nn.Module):
    """Hands a map to a model that writes into it, and goes on with the map."""

    def __init__(self, function: Callable[[Writing, Tensor], Tensor], *, detached: bool) -> None:
        super().__init__()
        self.first, self.inner, self.detached = nn.Conv2d(CHANNELS, CHANNELS, 1), Writing(function), detached

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        h = h.detach().clone() if self.detached else h
        return self.inner(h), h * h


class Entered(Writing):
    """Runs the function on the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self, x).sin())


def rectified(m: Writing, x: Tensor) -> Tensor:
    return m.inner(F.relu(x, inplace=True))


def scaled(m: Writing, x: Tensor) -> Tensor:
    return m.inner(x.mul_(m.scale))


def columns_filled(m: Writing, x: Tensor) -> Tensor:
    x[..., :5] = x[..., 5:10] + m.scale
    return x * 2


def halved_unseen(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(0.5)
    return m.inner(x)


def halved_and_scaled(m: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(0.5)
    return m.inner(x.add_(m.scale))


INPUTS: dict[str, Callable[[Writing, Tensor], Tensor]] = {
    "rectified": rectified,
    "scaled": scaled,
    "columns-filled": columns_filled,
    "halved-unseen": halved_unseen,
    "halved-and-scaled": halved_and_scaled,
}


def build_caller(write: str, detached: bool) -> tuple[nn.Module, tuple[Tensor]]:
    model = Caller(INPUTS[write], detached=detached)
    model.inner.__class__ = Entered
    return model, (torch.randn(2, CHANNELS, HEIGHT, WIDTH),)


def compare_callers(rank: int, case: Case) -> Difference:
    """Compare a model whose inner one is transformed (in a rank process)."""

    def change(model: nn.Module) -> nn.Module:
        model.inner = transformed(model.get_submodule("inner"), case)
        return model

    return compare_models(case, change)


@pytest.mark.parametrize("detached", [False, True], ids=["with-gradient", "without"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("write", INPUTS)
def test_the_caller_s_tensor_has_the_history_of_what_was_written(
    pool: RankPool, write: str, backend: str, detached: bool
) -> None:
    case = Case(partial(build_caller, write, detached), inner_backend=backend)
    for found in pool.run(compare_callers, case, ranks=2):
        assert found.exact(), str(found)


def refusal(rank: int) -> str:
    """Return why a write into a part is refused (in a rank process)."""
    torch.compiler.reset()
    model = Entered(scaled).double()
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    part = torch.ones(1, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    try:
        net(part)
    except FxShardError as error:
        assert bool((part == 1).all())
        return str(error)
    return ""


def test_a_part_that_gets_a_new_history_is_refused(pool: RankPool) -> None:
    for text in pool.run(refusal, ranks=2):
        assert "the model writes into its input L['args'][0], of which a rank passes its part" in text
        assert "return m.inner(x.mul_(m.scale))" in text
        assert "clone the input first" in text

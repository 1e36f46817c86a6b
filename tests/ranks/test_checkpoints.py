"""Activation checkpoints on ranks: less memory between forward and backward, the same gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fxshard.compare import Case, transformed
from fxshard.trace import build_model
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from fxshard.workers import RankPool

CLASSES = 5


def convnext(checkpointed: bool) -> tuple[nn.Module, tuple[Tensor]]:
    """Return timm's ConvNeXt, small, as its users checkpoint it: each block of a stage."""
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(depths=(3, 0, 0, 0), dims=(4, 8, 8, 8), num_classes=CLASSES, drop_path_rate=0.3)
    model.set_grad_checkpointing(checkpointed)
    return model, (torch.randn(2, 3, 64, 256),)


class Block(nn.Module):
    """Convolutions with batch norm and drop-out, in a checkpoint that begins and ends without gradients."""

    def __init__(self, channels: int, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm2d(channels), nn.Dropout(0.3)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, total = state
        y, peak = checkpoint(self._inside, x, use_reentrant=self.reentrant)
        return y, total + peak

    def _inside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            gate = x.sigmoid()
        y = self.second(self.drop(F.gelu(self.norm(self.first(x))) * gate))
        with torch.no_grad():
            peak = y.square().mean()
        return x + y, peak


class Blocks(nn.Module):
    """Checkpoints that hand on to one another."""

    def __init__(self, count: int, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2)
        self.blocks = nn.Sequential(*(Block(4, reentrant=reentrant) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.blocks((self.stem(x), x.new_ones(())))
        z: Tensor = self.head(y) / total
        return z


def blocks(reentrant: bool, count: int = 2) -> tuple[nn.Module, tuple[Tensor]]:
    return Blocks(count, reentrant=reentrant), (torch.randn(2, 3, 9, 26),)


class Nested(nn.Module):
    """A checkpoint that ends in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._inside, x, use_reentrant=False)
        return y

    def _inside(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda y: F.gelu(self.inner(y)), self.outer(x).sin(), use_reentrant=False)
        return y


def nested() -> tuple[nn.Module, tuple[Tensor]]:
    return Nested(), (torch.randn(2, 3, 9, 26),)


@dataclass(frozen=True)
class Kept:
    """What a forward leaves for the backward.

    Args:
        bytes: Allocated by the forward and not freed at its end, by the CPU's allocator.
        gradients: What the backward made of it.
    """

    bytes: int
    gradients: dict[str, Tensor]


def measure(rank: int, case: Case) -> Kept:
    """Run two steps and measure the second (in a rank process)."""
    model, (image,) = build_model(case)
    net = transformed(model, case)
    net(image).sum().backward()  # compiles
    model.zero_grad()
    torch.manual_seed(case.seed)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logits = net(image)
    kept = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Kept(kept, gradients)


def reference() -> dict[str, Tensor]:
    """Return the gradients of the untouched ConvNeXt without checkpoints, on one device."""
    case = Case(partial(convnext, False))
    model, (image,) = build_model(case)
    torch.manual_seed(case.seed)
    model(image).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inner_backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_a_checkpointed_convnext_keeps_less_and_has_the_same_gradients(pool: RankPool, inner_backend: str) -> None:
    expected = reference()
    plain, checkpointed = (
        pool.run(measure, Case(partial(convnext, on), inner_backend=inner_backend), ranks=2) for on in (False, True)
    )
    for whole, less in zip(plain, checkpointed, strict=True):
        assert less.bytes < 0.4 * whole.bytes  # 0.28 of it: what the blocks start from, and stem and downsampling
        torch.testing.assert_close(less.gradients, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("inner_backend", "reentrant"),
    [
        pytest.param("eager", True, id="eager-reentrant"),
        pytest.param("aot_eager", False, id="aot_eager-non-reentrant"),
        pytest.param("eager", False, id="eager-non-reentrant", marks=pytest.mark.nightly),
        pytest.param("aot_eager", True, id="aot_eager-reentrant", marks=pytest.mark.nightly),
    ],
)
def test_checkpoints_are_exact(pool: RankPool, inner_backend: str, *, reentrant: bool) -> None:
    # compiled, a checkpoint updates running statistics once; in eager mode its recomputation does it again
    case = Case(partial(blocks, reentrant), mesh_shape=(3,), inner_backend=inner_backend, reference_backend="aot_eager")
    assert_exact(pool, case)


@pytest.mark.nightly
def test_checkpoints_are_exact_under_inductor(pool: RankPool) -> None:
    assert_exact(pool, Case(nested, inner_backend="inductor", steps=1))


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
def test_a_checkpoint_in_a_checkpoint_is_exact(pool: RankPool, inner_backend: str) -> None:
    assert_exact(pool, Case(nested, inner_backend=inner_backend))


def exchanges_in_backward(rank: int, case: Case) -> str:
    """Return the order in which a backward recomputes (r) and differentiates (d) halos (in a rank process)."""
    model, inputs = build_model(case)
    total = transformed(model, case)(*inputs).sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        total.backward()
    letters = {"fxshard::halo_exchange": "r", "fxshard::halo_accumulate": "d"}
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    return "".join(letters[event.name] for event in events if event.name in letters)


@pytest.mark.parametrize("inner_backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_a_region_is_recomputed_once_right_before_its_own_backward(pool: RankPool, inner_backend: str) -> None:
    case = Case(partial(blocks, False, 3), inner_backend=inner_backend)
    for order in pool.run(exchanges_in_backward, case, ranks=2):
        # two convolutions in each block; the head is not in a checkpoint, and the stem's input needs no gradient
        assert order == "d" + 3 * "rrdd"

"""Calls that capture does not see through by itself are exact on ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool


class Between(nn.Module):
    """A call between two convolutions."""

    def __init__(self, call: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.call(self.before(x), self.training))
        return y


def dropped_then_written(y: Tensor, training: bool) -> Tensor:
    return F.dropout(y, 0.4, training).relu_()


def written_and_read_again(y: Tensor, training: bool) -> Tensor:
    z = F.dropout(y, 0.4, training)
    z[..., 2:5] *= 2
    return z + y  # in eval mode y is z


def nothing_to_drop(y: Tensor, training: bool) -> Tensor:
    return torch.dropout(y, 0.0, training).mul_(3) + y


def data(y: Tensor, training: bool) -> Tensor:
    return torch.cat([y.data.tanh(), y], 1)[:, 1:4]


CALLS = {f.__name__: f for f in (dropped_then_written, written_and_read_again, nothing_to_drop, data)}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Between(CALLS[name]), (torch.randn(2, 3, 6, 11),)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_exact(pool: RankPool, name: str, *, training: bool) -> None:
    assert_exact(pool, Case(partial(build, name), training=training))


def channels_last(*layers: nn.Module) -> tuple[nn.Module, tuple[Tensor]]:
    last = torch.channels_last
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).to(memory_format=last), (torch.randn(2, 3, 7, 21),)


class Rolled(nn.Module):
    """A shift, by the method or by the function."""

    def __init__(self, *, by_method: bool) -> None:
        super().__init__()
        self.by_method = by_method

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(2, 3) if self.by_method else torch.roll(x, (1, 2), (2, 3))


class Noisy(nn.Module):
    """Adds noise that is drawn into memory like its input's."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


# the fake kernels of these say contiguous, the CPU's keep channels last, and draws fill memory in its order
REORDERED: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor]]]] = {
    "group-norm": lambda: channels_last(nn.GroupNorm(4, 8), nn.SiLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 3, padding=1)),
    "roll": lambda: channels_last(Rolled(by_method=False), nn.Dropout(0.5)),
    "roll-method": lambda: channels_last(Rolled(by_method=True), nn.Dropout(0.5)),
    "shuffle": lambda: channels_last(nn.ChannelShuffle(2), nn.Dropout(0.5)),
    "noise": lambda: channels_last(nn.GroupNorm(4, 8), Noisy()),
    "random-slopes": lambda: channels_last(nn.RReLU(), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("name", REORDERED)
def test_draws_fill_memory_as_on_one_device(pool: RankPool, name: str) -> None:
    assert_exact(pool, Case(partial(build_reordered, name)), gathers=None)


def build_reordered(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return REORDERED[name]()


class Spectral(nn.Module):
    """The layer of a Fourier neural operator: the low frequencies are mixed, the others are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(self.conv(x))
        mixed = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)
        mixed[:, :, :3, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :4], weight)
        mixed[..., -2:, :4] = spectrum[..., -2:, :4]
        mixed[0, 0] = 1.0
        return torch.fft.irfft2(mixed, s=x.shape[-2:])


def build_spectral() -> tuple[nn.Module, tuple[Tensor]]:
    return Spectral(), (torch.randn(2, 3, 8, 16),)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_part_of_a_spectrum_is_written(pool: RankPool, backend: str) -> None:
    assert_exact(pool, Case(build_spectral, inner_backend=backend), gathers=True)

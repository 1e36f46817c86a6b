"""Operators that read memory by strides: exact on what fills its storage, refused on a part of something larger."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from fxshard.workers import WorkerError
from tests.ranks.checks import assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

aten = torch.ops.aten


@torch.library.custom_op("fxshard_tests::in_memory", mutates_args=())
def in_memory(x: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory: an operator that reads strides."""
    return x.as_strided((x.numel(),), (1,)).clone()


@in_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


def windows(y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    return torch.as_strided(y, (n, c, h, w - 2, 3), (*y.stride(), y.stride(3)))


def written(y: Tensor) -> Tensor:
    y = y.clone()
    torch.as_strided(y, (2, 5), (1, 7), 3).mul_(3)
    return y


def spectrum(y: Tensor) -> Tensor:
    window = torch.ones(4, dtype=y.dtype)
    return torch.stft(y.flatten(0, 2), 4, hop_length=2, window=window, return_complex=True).abs()


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": windows,
    "windows-of-copy": lambda y: windows(y[..., 1:].contiguous()),
    "windows-of-padded": lambda y: windows(F.pad(y, (1, 1))),
    "transposed": lambda y: torch.as_strided(y.transpose(2, 3), (y.numel() // 2,), (2,)),
    "flat": lambda y: torch.as_strided(y.flatten(2), (9, 4), (3, 1), 5),
    "normalised": lambda y: windows(F.layer_norm(y, y.shape[3:])),
    "copy": lambda y: aten.as_strided_copy(y.transpose(1, 3), [4, 6], [3, 5], 2),
    "scatter": lambda y: torch.as_strided_scatter(y.detach().mT, y[0, 0, :2, :3].detach(), (2, 3), (1, 4), 2),
    "written": written,
    "prefix": lambda y: aten.resize(y.detach().permute(0, 2, 3, 1), [3, 4]),
    "spectrum": spectrum,
}
"""Of the result of split work."""


class Reads(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 2) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, width, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x))


def build(name: str, channels_last: bool = False) -> tuple[nn.Module, tuple[Tensor]]:
    x = torch.randn(2, 2, 6, 9)
    return Reads(DENSE[name]), (x.contiguous(memory_format=torch.channels_last) if channels_last else x,)


@pytest.mark.parametrize("mesh", [((3,), (2,)), ((2,), (3,)), ((2, 3), (2, 2))], ids=["w-2", "h-3", "2x2"])
@pytest.mark.parametrize("name", DENSE)
def test_memory_is_read_as_on_one_device(pool: RankPool, name: str, mesh: tuple[tuple[int, ...], ...]) -> None:
    dims, shape = mesh
    assert_exact(pool, Case(partial(build, name), tuple(Shard(d) for d in dims), shape, steps=1), gathers=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["windows", "transposed", "written"])
def test_memory_under_other_backends(pool: RankPool, name: str, backend: str) -> None:
    assert_exact(pool, Case(partial(build, name, True), inner_backend=backend, steps=1), gathers=True)


def build_one_column() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a map whose parts, of one pixel, look contiguous and whose whole is not."""
    x = torch.randn(2, 3, 1, 4).contiguous(memory_format=torch.channels_last)
    return Weighted(), (x,)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        with torch.no_grad():
            order = torch.ops.fxshard_tests.in_memory(y)
        return y.sum() * order


def test_an_operator_without_a_rule_sees_the_strides_of_one_device(pool: RankPool) -> None:
    assert_exact(pool, Case(build_one_column, (Shard(3),), (4,), steps=1), gathers=True)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda y: torch.as_strided(y[..., 1:], (2, 2, 6, 6, 3), (108, 54, 9, 1, 1), 1),
    "channel": lambda y: torch.as_strided(y[:, 1], (4,), (1,)),
    "scattered": lambda y: torch.as_strided_scatter(y[:1], y[0, 0, 0], (9,), (1,), 40),
}


def build_part(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Reads(PARTS[name]), (torch.randn(2, 2, 6, 9),)


@pytest.mark.parametrize("name", PARTS)
def test_what_reads_around_its_input_is_refused(pool: RankPool, name: str) -> None:
    said = (
        r"aten\.as_strided\w*\.default reads memory around its input at .*test_rules_strided\.py.*of the 216 elements"
    )
    with pytest.raises(WorkerError, match=said) as refusal:
        pool.run(judge, [Case(partial(build_part, name))], ranks=2)
    assert {cause.type_name for cause in refusal.value.causes.values()} == {"PlanError"}

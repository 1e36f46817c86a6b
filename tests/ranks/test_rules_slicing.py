"""Slices, selections, splits and their scatters: exact, and no map is gathered for them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fxshard.compare import Case
from tests.ranks.checks import assert_exact
from tests.ranks.map_models import Mapped, image, splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from fxshard.workers import RankPool


def written(x: Tensor, where: Any, value: Any) -> Tensor:
    y = x * 1.5
    y[where] = value
    return y


def scaled_border(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :, 0] = 0
    y[:, :, -1] = 1.5
    y[..., :2] *= 0.5
    return y


def tokens(x: Tensor) -> Tensor:
    q, k, v = x.flatten(2).repeat(1, 3, 1).chunk(3, 1)
    return torch.cat([q[:, :2] * k[:, 1:3], v.roll(1, 1), v.flip(1)], 1) * v.select(1, 2)[:, None]


TABLE: dict[str, Callable[[Tensor], Any]] = {
    "crop": lambda x: x[:, :, 2:-1, 1:-2],
    "strided": lambda x: x[..., 1::2, ::3] * 2,
    "strided-tiny": lambda x: x[..., 1::7, 2::7] * 2,
    "half": lambda x: x[..., :6] * x[:, :, 7:, :6].sum(2, keepdim=True) + x[..., 6:12],
    "head": lambda x: x[..., :4].sin(),
    "last-column": lambda x: x[..., 12:].sin(),
    "tail": lambda x: x[..., 9:].sin(),
    "column": lambda x: x * x[..., 4:5] + x[:, :, -1:],
    "select": lambda x: x[..., -1].sum(-1) + x[:, :, 5].sum(-1) + x[:, 1].sum((1, 2))[:, None],
    "row-outer": lambda x: x[:, :, 3, :, None] + x[..., 6][:, :, None],
    "narrow": lambda x: x.narrow(3, 3, 7).narrow(2, 0, 9),
    "channels": lambda x: torch.sin(x[:, :2]) * x[:, 2:] + x[:, ::2],
    "infinite-column": lambda x: torch.nan_to_num(torch.log(x.relu())[..., 3:4]) + x,
    "mask-column": lambda x: x.where(x[..., 3:4] > 0, -x) * (x[:, :, 2:3] > 0.1),
    "integer-column": lambda x: x * torch.round(x * 10).to(torch.int64)[..., 3:4],
    "chunk": lambda x: [c[..., :6] * d[..., :6] for c, d in zip(x.chunk(2, 3), x.chunk(2, 3)[::-1], strict=True)],
    "split-sizes": lambda x: [torch.exp(p) for p in x.split([3, 4, 6], 2)] + [p + 1 for p in x.split([2, 2], 1)],
    "tensor-split": lambda x: [torch.exp(p) for p in torch.tensor_split(x, (5,), 3)],
    "unbind-channels": lambda x: x.unbind(1)[2] * x.unbind(0)[1][3],
    "write-rows": lambda x: written(x, (..., slice(None), 0), 0.0),
    "write-slice": lambda x: written(x, (..., slice(3, 9)), x[..., 2:8] * 2),
    "write-rows-of": lambda x: written(x, (slice(None), slice(None), slice(1, None, 2)), x[:, :, ::2][:, :, :6]),
    "write-column": lambda x: written(x, (..., 5), x[..., 4] * 3),
    "write-channel": lambda x: written(x, (slice(None), 2), x[:, 1] * 2),
    "write-corner": lambda x: written(x, (..., slice(0, 2), slice(0, 2)), 1.5),
    "scale-border": scaled_border,
    "tokens": tokens,
    "write-whole": lambda x: torch.zeros_like(x).copy_(x[..., :1]) * x,
}
"""Functions of a map of shape (2, 4, 13, 13)."""


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(TABLE[name]), (image(2, 4, 13, 13),)


@pytest.mark.parametrize(("name", "placements", "mesh"), splits(TABLE))
def test_slice_equals_one_device(pool: RankPool, name: str, placements: Any, mesh: tuple[int, ...]) -> None:
    assert_exact(pool, Case(functools.partial(build, name), placements, mesh, steps=1))


def build_many_pieces() -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(lambda x: x.split(1, 3)[4] * x.unbind(2)[0][..., :1, None]), (image(2, 4, 13, 13),)


def test_pieces_of_one_column_are_gathered_with_their_number(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(build_many_pieces, mesh_shape=(2,)), gathers=True)
    assert any("13 pieces of 1 columns" in reason for reason in verdict.reasons)


def test_a_column_travels_alone(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(functools.partial(build, "column"), mesh_shape=(2,)))
    assert sum("all_gather" in target for target in verdict.targets) == 1, "only the output is gathered"
    assert sum("all_reduce" in target for target in verdict.targets) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", ["head", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("tail", "last-column", "write-slice"))]
)
def test_ranks_agree_when_compiled(pool: RankPool, name: str, backend: str) -> None:
    case = Case(functools.partial(build, name), mesh_shape=(3,), inner_backend=backend, steps=1)
    assert_exact(pool, case)

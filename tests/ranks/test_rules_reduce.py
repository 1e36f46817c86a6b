"""Reductions, extrema, norms, scans and softmax over split and whole dimensions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard._torch import FakeTensorMode
from fxshard.compare import Case
from fxshard.workers import WorkerError
from tests.ranks.checks import assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool

_MADE_BY = torch.ones(1, requires_grad=True).aminmax().min.grad_fn
HAS_DERIVATIVE = _MADE_BY is not None and "NotImplemented" not in _MADE_BY.name()


class Of(nn.Module):
    """Functions of an image that is the result of split work and has ties, zeros and both signs."""

    def __init__(self, *functions: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.functions = functions
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Any]:
        image = x * self.scale
        return [function(image) for function in self.functions]


def with_nan(x: Tensor) -> Tensor:
    return x.masked_fill(x == 1, torch.nan)


def aminmax(x: Tensor, **options: Any) -> Any:
    """Return both extrema; torch 2.11 has no derivative of them."""
    return torch.aminmax(x if HAS_DERIVATIVE else x.detach(), **options)


def flat(x: Tensor) -> Tensor:
    return x.flatten(2)


W_AND_H, ALL = (2, 3), (0, 1, 2, 3)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], ...]] = {
    "sum": (lambda x: x.sum(), lambda x: x.sum(3), lambda x: x.sum(W_AND_H, keepdim=True), lambda x: x.sum(1)),
    "sum-integers": (lambda x: (x > 0).sum(), lambda x: x.long().sum(3), lambda x: (x > 0).sum(2, dtype=torch.float64)),
    "mean": (
        lambda x: x.mean(),
        lambda x: x.mean(3),
        lambda x: x.mean(W_AND_H),
        lambda x: x.mean((1, 3), keepdim=True),
    ),
    "mean-of-integers": (lambda x: x.long().mean(dtype=torch.float64), lambda x: (x > 0).double().mean(W_AND_H)),
    "nansum": (lambda x: with_nan(x).nansum(), lambda x: with_nan(x).nansum(3), lambda x: with_nan(x).nanmean(W_AND_H)),
    "count": (lambda x: x.count_nonzero(), lambda x: x.count_nonzero((2, 3)), lambda x: (x * x.count_nonzero()).sum()),
    "prod": (lambda x: x[:, :, :2].prod(3), lambda x: (x + 5).prod(2, keepdim=True), lambda x: (x / 3 + 1.5).prod()),
    "logsumexp": (
        lambda x: x.logsumexp(3),
        lambda x: (200 * x).logsumexp(W_AND_H, keepdim=True),
        lambda x: x.logsumexp(1),
    ),
    "logsumexp-of-masked": (lambda x: x.masked_fill(x > -2, -torch.inf).detach().logsumexp(3),),
    "var": (lambda x: x.var(), lambda x: x.var(3), lambda x: x.var(W_AND_H, correction=0), lambda x: x.var(1)),
    "std": (lambda x: x.std(), lambda x: x.std(W_AND_H, keepdim=True), lambda x: x.std(3, unbiased=False)),
    "std-of-constant": (lambda x: (x * 0 + 1).std(W_AND_H), lambda x: torch.std(x[:, :1] * 0, 3)),
    "var-mean": (lambda x: torch.var_mean(x, 3), lambda x: torch.std_mean(x, W_AND_H), torch.std_mean),
    "norm-2": (lambda x: x.norm(), lambda x: x.norm(dim=3), lambda x: x.norm(dim=W_AND_H, keepdim=True)),
    "norm-0-1": (lambda x: x.norm(0) + x.norm(1), lambda x: x.norm(1, dim=3), lambda x: torch.norm(x, 1, 2)),
    "norm-inf": (lambda x: x.norm(torch.inf), lambda x: x.norm(torch.inf, dim=3), lambda x: x.norm(-torch.inf, dim=2)),
    "norm-general": (lambda x: x.norm(3), lambda x: x.norm(1.5, dim=3), lambda x: x.norm(0.5, dim=2)),
    "norm-of-zero": (lambda x: (x * 0).norm(dim=3), lambda x: (x * 0).norm(3, dim=2), lambda x: (x * 0).norm(1.5)),
    "norm-linalg": (
        lambda x: torch.linalg.vector_norm(x, 2, (1, 3)),
        lambda x: torch.linalg.vector_norm(x.float(), 3, dtype=torch.float64),
        lambda x: torch.linalg.matrix_norm(x, "fro"),
    ),
    "amax": (lambda x: x.amax(3), lambda x: x.amax(W_AND_H, keepdim=True), lambda x: x.amax(), lambda x: x.amax(1)),
    "amin": (lambda x: x.amin(3), lambda x: x.amin(W_AND_H), lambda x: x.amin((0, 3)), lambda x: x.long().amin(3)),
    "max": (lambda x: x.max(), lambda x: x.min(), aminmax, lambda x: aminmax(x, dim=3)),
    "max-of-infinities": (
        lambda x: x.masked_fill(x > 1, torch.inf).amax(3),
        lambda x: x.masked_fill(x < 3, -torch.inf).amax(3),
    ),
    "max-dim": (lambda x: x.max(3), lambda x: x.min(2, keepdim=True), lambda x: x.max(1), lambda x: flat(x).max(2)),
    "max-dim-of-integers": (lambda x: x.long().max(3), lambda x: flat(x.long()).min(-1)),
    "argmax": (lambda x: x.argmax(3), lambda x: x.argmin(2), lambda x: x.argmax(1), lambda x: x.argmin()),
    "argmax-flat": (lambda x: flat(x).argmax(-1), lambda x: flat(x).argmin(-1, keepdim=True), lambda x: x.argmax()),
    "any-all": (lambda x: (x > 2).any(), lambda x: (x > 2).any(3), lambda x: (x > -2).all(W_AND_H), lambda x: x.all(2)),
    "no-dims": (lambda x: x.sum(()), lambda x: x.mean([]), lambda x: x.amax(()), lambda x: x.amin((), keepdim=True)),
    "no-dims-of-truth": (
        lambda x: x * (x > 2).any(()),  # nothing is reduced, unlike by all the others
        lambda x: torch.all(x, ()),
        lambda x: torch.any(x.long(), [], keepdim=True),
    ),
    "no-dims-norm": (
        lambda x: torch.norm(x, dim=()),
        lambda x: x.norm(1, ()),
        lambda x: torch.linalg.vector_norm(x, 3, ()),
    ),
    "no-dims-count": (lambda x: x.count_nonzero(()), lambda x: x * x.count_nonzero([])),
    "no-dims-logsumexp": (lambda x: x.logsumexp((), keepdim=True),),
    "no-dims-variance": (  # eager mode's own gradient is infinite here
        lambda x: x.detach().var(()),
        lambda x: x.detach().std([]),
        lambda x: torch.var_mean(x.detach(), ()),
        lambda x: torch.std_mean(x.detach(), (), keepdim=True),
    ),
    "cumsum": (lambda x: x.cumsum(3), lambda x: x.cumsum(2), lambda x: x.cumsum(1), lambda x: (x > 0).cumsum(3)),
    "cumprod": (lambda x: x.cumprod(3), lambda x: (x / 4 + 1.25).cumprod(2)),
    "softmax": (
        lambda x: x.softmax(1),
        lambda x: x.softmax(3),
        lambda x: flat(300 * x).softmax(2),
        lambda x: x.float().softmax(2, dtype=torch.float64),
    ),
    "log-softmax": (lambda x: x.log_softmax(1), lambda x: (300 * x).log_softmax(3), lambda x: flat(x).log_softmax(2)),
}
NO_DIMS_NAN = (lambda x: with_nan(x).nansum(()), lambda x: with_nan(x).nanmean([]), lambda x: x * x.nansum(()))
"""What torch 2.11 gives another shape on fake tensors than on real ones."""
NAN = {
    "max-of-nan": (lambda x: with_nan(x).amax(3), lambda x: with_nan(x).max(3), lambda x: with_nan(x).argmax(2)),
    "amax-of-nan": (lambda x: with_nan(x).amax(3),),
}
MESHES = {"w-2": ((3,), (2,)), "h-3": ((2,), (3,)), "2x2": ((2, 3), (2, 2))}


def image() -> Tensor:
    """Small integers, so that extrema are tied within ranks and across them, and rows of zeros."""
    x = torch.randint(-3, 4, (2, 3, 7, 10)).double()
    x[0, 0] = 0
    return x


def build(name: str, table: dict[str, Any] = FUNCTIONS) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Of(*{**FUNCTIONS, **NAN, "no-dims-nan": NO_DIMS_NAN}[name]), (image(),)


def case(name: str, mesh: str, **options: Any) -> Case:
    dims, shape = MESHES[mesh]
    return Case(functools.partial(build, name), tuple(Shard(d) for d in dims), shape, steps=1, **options)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reduction_equals_one_device(pool: RankPool, name: str, mesh: str) -> None:
    assert_exact(pool, case(name, mesh))


@pytest.mark.parametrize("mesh", MESHES)
def test_nan_wins(pool: RankPool, mesh: str) -> None:
    assert_exact(pool, case("max-of-nan", mesh, no_grad=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_nan_has_its_gradient(pool: RankPool, mesh: str) -> None:
    assert_exact(pool, case("amax-of-nan", mesh))


def test_nansum_of_no_dims_is_of_all_or_refused(pool: RankPool) -> None:
    with FakeTensorMode():
        fake_is_right = torch.empty(2, 3).nansum(()).ndim == 0
    if fake_is_right:
        assert_exact(pool, case("no-dims-nan", "w-2"))
        return
    with pytest.raises(WorkerError, match=r"aten\.nansum\.default returns torch\.float64\[\] in place of"):
        pool.run(judge, [case("no-dims-nan", "w-2")], ranks=2)


UNDER_AOT = ("amax",)
AT_NIGHT = ("logsumexp", "std", "max-dim", "argmax-flat", "prod", "cumsum")


@pytest.mark.parametrize("name", [*UNDER_AOT, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_reduction_under_aot_autograd(pool: RankPool, name: str) -> None:
    assert_exact(pool, case(name, "2x2", inner_backend="aot_eager"))

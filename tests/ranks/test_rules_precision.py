"""In 16 and 32 bits the sharded model's rounding is of the size of the untouched model's own."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import KINDS, Case, difference, run_steps
from fxshard.trace import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool


ROUNDING = torch.finfo(torch.float32).eps


class Reduces(nn.Module):
    """A function of an image far from zero, where sums of few bits go wrong."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


def loss(x: Tensor) -> Tensor:
    target = torch.arange(x[:, 0].numel(), device=x.device).reshape(x[:, 0].shape) % 3
    return F.cross_entropy(x, target, ignore_index=1, label_smoothing=0.1)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "var": lambda x: x.var((2, 3)),
    "std-mean": lambda x: torch.std_mean(x, (0, 2, 3)),
    "norm": lambda x: x.norm(dim=(2, 3)),
    "amax": lambda x: x.amax((2, 3)),
    "logsumexp": lambda x: x.logsumexp(3),
    "softmax": lambda x: x.flatten(2).softmax(2),
    "log-softmax": lambda x: x.flatten(2).log_softmax(2),
    "cumsum": lambda x: x.cumsum(3),
    "cross-entropy": loss,
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Reduces(FUNCTIONS[name]), (torch.randn(2, 3, 24, 40) * 0.5 + 4,)


def build_group_norm() -> tuple[nn.Module, tuple[Tensor]]:
    net = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
    return net, (torch.randn(2, 8, 13, 10) * 0.05 + 100,)


def judge_rounding(rank: int, case: Case) -> tuple[bool, str]:
    from fxshard.api import transform
    from fxshard.rank_process import mesh

    torch.compiler.reset()
    exact = dataclasses.replace(case, dtype=torch.float64)
    reference = run_steps(*build_model(exact), exact)
    own = run_steps(*build_model(case), case)
    model, inputs = build_model(case)
    net = transform(model, mesh=mesh(case.mesh_shape), placements=case.placements, inner_backend="eager")
    sharded = run_steps(net, inputs, case)
    floor, error = (difference(reference, trace, dtypes=False) for trace in (own, sharded))
    # the ranks' terms of a parameter's gradient are rounded before they are added
    terms = {"parameter gradient": torch.finfo(case.dtype).eps}
    within = all(error.worst[k].error <= 2 * floor.worst[k].error + terms.get(k, ROUNDING) for k in KINDS)
    return within and not error.mismatches, f"untouched\n{floor}\nsharded\n{error}"


def assert_rounds_as_one_device(pool: RankPool, case: Case) -> None:
    for rank, (within, text) in enumerate(pool.run(judge_rounding, case, ranks=case.mesh_shape[0])):
        assert within, f"rank {rank}: {text}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sixteen_bits(pool: RankPool, name: str, dtype: torch.dtype) -> None:
    case = Case(functools.partial(build, name), (Shard(3),), (3,), steps=1, dtype=dtype)
    assert_rounds_as_one_device(pool, case)


@pytest.mark.parametrize("dim", [2, 3])
def test_large_offset_in_float32(pool: RankPool, dim: int) -> None:
    assert_rounds_as_one_device(pool, Case(build_group_norm, (Shard(dim),), (3,), dtype=torch.float32))

"""The comparison inside ranks: each rank judges what it sees, on the mesh that the case names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case, Difference, compare_on_rank

if TYPE_CHECKING:
    from fxshard.workers import RankPool


def conv() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Conv2d(2, 3, 3), (torch.randn(2, 2, 5, 7),)


def average_over_ranks(model: nn.Module, *, mesh: Any, placements: Any, inner_backend: str, rng: str) -> nn.Module:
    """Stand-in for the transform: every rank has the whole output and the ranks agree on it."""
    assert (placements, inner_backend, rng) == ([Shard(3)], "aot_eager", "match")

    def average(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        total = output.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("w"))
        averaged: Tensor = output + (total / mesh.size() - output.detach())
        return averaged

    model.register_forward_hook(average)
    return model


def off_on_rank_1(model: nn.Module, *, mesh: Any, **_options: Any) -> nn.Module:
    if mesh.get_local_rank() == 1:
        model.register_forward_hook(lambda _module, _args, output: output * 1.5)
    return model


def compare_with(rank: int, transform: Any, case: Case) -> Difference:
    with patch("fxshard.compare.transform", transform):
        return compare_on_rank(rank, case)


def test_each_rank_compares_on_the_mesh_of_the_case(pool: RankPool) -> None:
    case = Case(build=conv, mesh_shape=(3,), inner_backend="aot_eager", options={"rng": "match"})
    results = pool.run(compare_with, average_over_ranks, case, ranks=3)
    assert [(result.exact(), result.worst["output"].where[:6]) for result in results] == [(True, "step 0")] * 3


def test_one_rank_that_is_wrong_is_seen_by_that_rank(pool: RankPool) -> None:
    results = pool.run(compare_with, off_on_rank_1, Case(build=conv), ranks=2)
    assert [result.exact() for result in results] == [True, False]

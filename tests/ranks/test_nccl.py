"""What only GPUs show: collectives of NCCL, in CUDA graphs, too.  Without a GPU nothing here runs.

One GPU will do, which the ranks then share.  The tables of the other files run on GPUs with ``--rank-device cuda``.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from fxshard.workers import RankPool
from tests.ranks import test_models, test_modes
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.nightly,
    pytest.mark.timeout(600),
]
RANKS = 3
GRAPHS: dict[str, Any] = {"inner_backend": "inductor", "options": {"mode": "reduce-overhead"}, "steps": 6}
"""The first step compiles, the second records, the others replay."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS, device="cuda", timeout_s=600) as ranks:
        yield ranks


@pytest.mark.parametrize("build", [test_modes.build, test_models.shallow_resnet, test_models.shallow_convnext])
def test_what_cuda_graphs_replay_is_exact(pool: RankPool, build: Callable[[], Any]) -> None:
    assert_exact(pool, Case(build, mesh_shape=(2,), **GRAPHS))


def uneven_columns() -> tuple[nn.Module, tuple[Tensor]]:
    """Return blocks of which ranks hold 2 or 3 columns, with branches that count: timm scales them by 1e-6."""
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(depths=(0, 0, 3, 1), dims=(4, 4, 8, 8), num_classes=5)
    for name, parameter in model.named_parameters():
        if "gamma" in name:
            nn.init.normal_(parameter)
    return model, (torch.randn(2, 3, 97, 130),)


def test_columns_in_threes_are_read_where_they_are(pool: RankPool) -> None:
    """Assembled as Triton would have it, kernels read three columns beside: gradients were wrong by a tenth."""
    assert_exact(pool, Case(uneven_columns, mesh_shape=(3,), inner_backend="inductor"), gathers=None)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["convnext_atto", "resnet18"])
def test_models_are_exact(pool: RankPool, name: str, backend: str) -> None:
    case = Case(partial(test_models.build, name, *test_models.UNEVEN), (Shard(3),), (RANKS,), backend)
    assert_exact(pool, case, gathers=None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_budget_is_exact(pool: RankPool, ranks: int) -> None:
    options = {"memory_budget": 0.3}
    assert_exact(pool, Case(test_modes.build, mesh_shape=(ranks,), inner_backend="inductor", options=options, steps=6))


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_ranks_with_cuda_graphs_come_to_their_end(end: str) -> None:
    """A communicator does not end while a CUDA graph has it: torch alone waits for ever (pytorch issue 115388)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.ranks.cuda_graphs_end", end]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} came to its end" for rank in range(2)]

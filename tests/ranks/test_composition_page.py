"""The programs of ``docs/composition.md`` run on ranks as they do on one device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.data import DistributedSampler

from fxshard.api import transform
from fxshard.workers import mesh
from tests.pages import blocks
from tests.ranks.test_composition import State, batch, build, state
from tests.ranks.test_readme import PROGRAMS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fxshard.workers import RankPool

PAGE = "docs/composition.md"
ON_A_MESH = ("init_device_mesh", "fully_shard", "DistributedSampler")
"""What is in the programs that need a mesh of two axes."""
TOLERANCES = {"autocast": 0.05}
"""Of programs that compute in 16 bits."""
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "dcp": dcp,
    "get_state_dict": get_state_dict,
    "set_state_dict": set_state_dict,
    "device": "cpu",
}


def programs() -> list[str]:
    return [block.text for block in blocks(PAGE) if block.is_program]


def needs_a_mesh(program: str) -> bool:
    return any(word in program for word in ON_A_MESH)


def results(program: str, model: nn.Module, net: nn.Module) -> State:
    """Run a program of the page, and a step after it; return the parameters, and what it names ``logits``."""
    images, labels = batch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = {**NAMES, "net": net, "images": images, "labels": labels, "optimizer": optimizer}
    exec(program, names)
    F.cross_entropy(net(images), labels).backward()
    optimizer.step()
    return state(model) | {name: value for name, value in names.items() if name == "logits"}


def results_on_rank(rank: int, program: str, folder: str, ranks: int) -> State:
    torch.compiler.reset()
    model = build()
    net = transform(model, mesh=mesh((ranks,)), placements=[Shard(3)], inner_backend="eager")
    with contextlib.chdir(folder):
        return results(program, model, net)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("program", [p for p in programs() if not needs_a_mesh(p)], ids=lambda p: p.split("(")[0][:24])
def test_a_program_gives_on_ranks_what_it_gives_on_one_device(pool: RankPool, tmp_path: Path, program: str) -> None:
    here, on_ranks = tmp_path / "here", tmp_path / "ranks"
    here.mkdir()
    on_ranks.mkdir()
    model = build()
    with contextlib.chdir(here):
        expected = results(program, model, model)
    tolerance = next((limit for word, limit in TOLERANCES.items() if word in program), 1e-9)
    ranks = 4 if "dcp" in program else 2  # a checkpoint is written by all ranks of the default group
    for found in pool.run(results_on_rank, program, str(on_ranks), ranks, ranks=ranks):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 100)


def sampled_on_rank(rank: int, program: str) -> list[int]:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "width"))
    names: dict[str, Any] = {"DistributedSampler": DistributedSampler, "mesh": axes, "dataset": range(8)}
    exec(program, names)
    return list(names["sampler"])


def test_programs_on_a_mesh_of_two_axes(pool: RankPool) -> None:
    (sampler,) = (program for program in programs() if "DistributedSampler" in program)
    others = {program for program in programs() if needs_a_mesh(program)} - {sampler}
    assert others <= set(PROGRAMS)  # test_readme.py runs them
    upper, same, lower, also = pool.run(sampled_on_rank, sampler)
    assert (upper, lower) == (same, also)
    assert sorted(upper + lower) == list(range(8))

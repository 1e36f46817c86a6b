"""Faults planted in fxshard are found by a comparison, and named by the bisection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from torch.distributed.tensor import Shard

from fxshard.bisect import Culprit, bisect_on_rank, first_of
from fxshard.cli import main
from fxshard.compare import compare_on_rank
from fxshard.trace import Case
from tests.ranks import faults
from tests.ranks.faults import FAULTS
from tests.ranks.test_checkpoints import blocks
from tests.ranks.test_models import shallow_convnext

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fxshard.trace import Inputs
    from fxshard.workers import RankPool

CASE = Case(faults.build, (Shard(3),), (2,))


def plant_and_look(rank: int, name: str) -> tuple[bool, Culprit | None]:
    """Return whether the sharded model is exact, and what the bisection names (runs in a rank process)."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        return compare_on_rank(rank, CASE).exact(), bisect_on_rank(rank, CASE)


NETS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "each layer": faults.build,
    "drop path": shallow_convnext,
    "checkpoints": partial(blocks, reentrant=False),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_without_a_fault_nothing_is_found(pool: RankPool, name: str, backend: str) -> None:
    assert pool.run(bisect_on_rank, Case(NETS[name], (Shard(3),), (2,), backend), ranks=2) == [None] * 2


EACH_CHANGE = ("dropped gradient sum", "wrong border fill", "running variance biased", "another formula for a norm")


@pytest.mark.parametrize(
    "name", [n if n in EACH_CHANGE else pytest.param(n, marks=pytest.mark.nightly) for n in FAULTS]
)
def test_a_planted_fault_is_found_and_named(pool: RankPool, name: str) -> None:
    fault = FAULTS[name]
    found = pool.run(plant_and_look, name, ranks=2)
    assert not all(exact for exact, _ in found)
    culprit = first_of([culprit for _, culprit in found])
    assert culprit is not None
    assert culprit.kind == fault.kind, str(culprit)
    assert culprit.op.startswith(fault.op), str(culprit)
    assert fault.line in (" ".join(culprit.users) or culprit.source), str(culprit)


@pytest.mark.nightly
def test_the_command_names_the_node_of_a_planted_fault(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--input", "2x3x12x32", "--world-size", "2", "--split", "W", "--bisect"]
    assert main(["verify", f"{faults.__name__}:faulty", *asked]) == 1
    said = capsys.readouterr().out
    assert "NOT THE SAME" in said
    assert "(aten.max_pool2d.default) differs by" in said
    assert "F.max_pool2d(x - 9, 3, 2, 1)" in said

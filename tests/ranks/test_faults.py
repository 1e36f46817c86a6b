"""Faults of one rank while the model runs: each rank is told what happened, and where, before long."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.ops import halo_exchange
from fxshard.ops.wire import swap_blocks
from fxshard.workers import RankPool, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 3.0
"""Of a collective in these tests; torch's own default is 10 to 30 minutes."""
LIMIT_S = 20.0


@dataclass(frozen=True)
class Told:
    """What a rank was told.

    Args:
        kind: The error's class.
        text: Its message.
        seconds: How long it took.
    """

    kind: str
    text: str
    seconds: float


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: a collective that fails leaves its process group unusable."""
    with RankPool(2) as ranks:
        yield ranks


def out_of_memory(*_: Any) -> Any:
    msg = "CUDA out of memory. Tried to allocate 20.00 GiB"
    raise torch.OutOfMemoryError(msg)


def late(*args: Any) -> Any:
    time.sleep(2 * TIMEOUT_S)
    return swap_blocks(*args)


def ended(*_: Any) -> Any:
    os._exit(3)


FAULTS: dict[str, Callable[..., Any]] = {"out of memory": out_of_memory, "late": late, "ended": ended}


def train_with(rank: int, fault: str, note: str = "") -> Told:
    """Train until something is raised; rank 1 has the fault in its second step (runs in a rank process)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    net = transform(model, mesh=mesh, placements=[Shard(3)], inner_backend="eager")
    net(torch.ones(2, 3, 8, 12)).sum().backward()
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(halo_exchange, "swap_blocks", FAULTS[fault])
        try:
            net(torch.ones(2, 3, 8, 12)).sum().backward()
        except Exception as error:
            told = Told(type(error).__name__, str(error), time.monotonic() - start)
            if note:
                Path(note).write_text(json.dumps(dataclasses.asdict(told)))
            return told
    return Told("", "", time.monotonic() - start)


def test_out_of_memory_on_one_rank_is_told_to_the_other(pair: RankPool) -> None:
    other, own = pair.run(train_with, "out of memory", ranks=2)
    assert own.kind == "OutOfMemoryError"
    assert other.kind == "RankMismatchError"
    assert "a collective of the model failed, as another rank ended, raised or was late" in other.text
    assert "rank 1: it raised while it ran the model: OutOfMemoryError: CUDA out of memory" in other.text
    assert max(own.seconds, other.seconds) < LIMIT_S


@pytest.mark.nightly
def test_a_rank_that_ends_is_told_to_the_other(pair: RankPool, tmp_path: Path) -> None:
    note = tmp_path / "told.json"
    with pytest.raises(WorkerError, match="exit code 3"):
        pair.run(train_with, "ended", str(note), ranks=2)
    told = Told(**json.loads(note.read_text()))
    assert told.kind == "RankMismatchError"
    assert "another rank ended" in told.text
    assert told.seconds < LIMIT_S


@pytest.mark.nightly
def test_a_rank_that_is_too_late_for_a_collective_is_told(pair: RankPool) -> None:
    for told in pair.run(train_with, "late", ranks=2):
        assert told.kind == "RankMismatchError"
        assert "a collective of the model failed, as another rank ended, raised or was late" in told.text
        assert told.seconds < LIMIT_S

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

from fxshard import watchdog
from fxshard.api import transform
from fxshard.ops import gradient_bucket, halo_accumulate, halo_exchange
from fxshard.ops.wire import swap_blocks
from fxshard.workers import RankPool, WorkerError
from fxshard.workers import mesh as mesh_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 2.0
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


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: faults must not reach the other tests."""
    with RankPool(2) as ranks:
        yield ranks


def out_of_memory(*_: Any) -> Any:
    msg = "CUDA out of memory. Tried to allocate 20.00 GiB"
    raise torch.OutOfMemoryError(msg)


def late(*args: Any) -> Any:
    time.sleep(2 * TIMEOUT_S)  # where rank 1 is found
    return swap_blocks(*args)


def ended(*_: Any) -> Any:
    os._exit(3)


FAULTS: dict[str, Callable[..., Any]] = {"out of memory": out_of_memory, "late": late, "ended": ended}


def train_with(rank: int, fault: str, where: str, inner_backend: str, note: str = "") -> Told:
    """Train until something is raised; rank 1 has the fault in its second step (runs in a rank process).

    Args:
        rank: This rank.
        fault: A name of ``FAULTS``.
        where: ``"forward"``, ``"backward"``, or ``"between"`` them: there rank 1 is late.
        inner_backend: As ``transform`` takes it.
        note: A file for what was told, where the result is lost.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    net = transform(model, mesh=mesh, placements=[Shard(3)], inner_backend=inner_backend)
    net(torch.ones(2, 3, 8, 12)).sum().backward()
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and where != "between":
            patch.setattr(halo_exchange if where == "forward" else halo_accumulate, "swap_blocks", FAULTS[fault])
        try:
            out = net(torch.ones(2, 3, 8, 12))
            if rank == 1 and where == "between":
                time.sleep(2 * TIMEOUT_S)  # where rank 1 is found
            out.sum().backward()
        except Exception as error:
            told = Told(type(error).__name__, str(error), time.monotonic() - start)
            if note:
                Path(note).write_text(json.dumps(dataclasses.asdict(told)))
            return told
    return Told("", "", time.monotonic() - start)


def lose_a_sum(rank: int, inner_backend: str) -> Told:
    """Train without a halo, so that the sum of gradients is all that is sent; rank 1 never starts its second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    local: Any = {"inputs": "local", "outputs": "local"}
    net = transform(model, mesh=mesh, placements=[Shard(0)], inner_backend=inner_backend, **local)
    net(torch.ones(1, 3, 4, 4)).to_local().sum().backward()
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(gradient_bucket, "_flat", out_of_memory)
            patch.setattr(gradient_bucket, "_sum", out_of_memory)
        try:
            net(torch.ones(1, 3, 4, 4)).to_local().sum().backward()
        except Exception as error:
            return Told(type(error).__name__, str(error), time.monotonic() - start)
    return Told("", "", time.monotonic() - start)


def test_a_sum_of_gradients_that_one_rank_never_starts_is_told(pair: RankPool) -> None:
    other, own = pair.run(lose_a_sum, "eager")
    assert own.kind == "OutOfMemoryError"
    assert other.kind == "RankMismatchError"
    assert "rank 1: it raised while it ran the model: OutOfMemoryError: CUDA out of memory" in other.text
    assert max(own.seconds, other.seconds) < LIMIT_S


def look_at_collectives(rank: int) -> list[str]:
    """Return the report of a watchdog that reported one collective, out of it and in the next one."""
    spatial = mesh_of_ranks((2,))
    dog = watchdog.Watchdog(spatial)
    dog._store = dist.HashStore()
    dog.report = "a collective of the model does not end"
    dog._waits_in = 1
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        for is_in, number in ((False, 1), (True, 2)):
            patch.setattr(watchdog, "is_in_collective", lambda is_in=is_in: is_in)
            patch.setattr(watchdog, "collectives_started", lambda number=number: number)
            dog._look()
            reports.append(dog.report)
    return reports


def test_a_report_is_of_the_last_collective_that_did_not_end(pair: RankPool) -> None:
    assert pair.run(look_at_collectives) == [["a collective of the model does not end", ""]] * 2


FAILED = "a collective of the model failed, as another rank ended, raised or was late"
AT_NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("where", "inner_backend"),
    [("forward", "eager"), ("backward", "aot_eager"), pytest.param("backward", "eager", marks=AT_NIGHT)],
)
def test_out_of_memory_on_one_rank_is_told_to_the_other(pair: RankPool, where: str, inner_backend: str) -> None:
    other, own = pair.run(train_with, "out of memory", where, inner_backend)
    assert own.kind == "OutOfMemoryError"
    assert other.kind == "RankMismatchError"
    assert FAILED in other.text
    assert "rank 1: it raised while it ran the model: OutOfMemoryError: CUDA out of memory" in other.text
    assert max(own.seconds, other.seconds) < LIMIT_S


@pytest.mark.parametrize(
    ("where", "inner_backend"),
    [
        ("between", "eager"),
        pytest.param("forward", "eager", marks=AT_NIGHT),
        pytest.param("backward", "aot_eager", marks=AT_NIGHT),
        pytest.param("between", "inductor", marks=AT_NIGHT),
    ],
)
def test_a_stuck_collective_names_its_layer_and_what_each_rank_does(
    pair: RankPool, where: str, inner_backend: str
) -> None:
    stuck, late = pair.run(train_with, "late", where, inner_backend, timeout_s=200)
    operator = "halo_exchange of 2x4x8x6 in 1" if where == "forward" else "halo_accumulate of 2x4x8x10 in 1"
    if inner_backend == "inductor":  # its code has no names of layers
        operator = "halo_accumulate"
    for told in (stuck, late):
        assert told.kind == "RankMismatchError"
        assert FAILED in told.text
        assert f"rank 0: for 1 s in fxshard.{operator}" in told.text
        assert "rank 1: at " in told.text
        assert "test_faults.py:" in told.text
        assert ": time.sleep(2 * TIMEOUT_S)  # where rank 1 is found" in told.text
        assert told.seconds < LIMIT_S


@pytest.mark.nightly
def test_a_rank_that_ends_is_told_to_the_other(pair: RankPool, tmp_path: Path) -> None:
    note = tmp_path / "told.json"
    with pytest.raises(WorkerError, match="exit code 3"):
        pair.run(train_with, "ended", "forward", "eager", str(note))
    told = Told(**json.loads(note.read_text()))
    assert told.kind == "RankMismatchError"
    assert "another rank ended" in told.text
    assert told.seconds < LIMIT_S

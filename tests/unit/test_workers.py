"""The pool of ranks: results, failures, hangs and the restart after them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import FxShardError
from fxshard.workers import RankPool, WorkerError, default_meshes, mesh

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Three ranks, so that a sub-mesh and an idle rank exist."""
    with RankPool(3, grace_s=1, timeout_s=60) as ranks:
        yield ranks


def scale(rank: int, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor * rank


def process_id(rank: int) -> tuple[int, int]:
    return rank, os.getpid()


def sum_over_mesh(rank: int, shape: tuple[int, ...]) -> tuple[float, tuple[str, ...] | None]:
    axes = mesh(shape)
    value = torch.tensor([float(rank + 1)])
    for axis in range(len(shape)):
        dist.all_reduce(value, group=axes.get_group(axis))
    return value.item(), axes.mesh_dim_names


def same_mesh(_rank: int) -> bool:
    return mesh((2,)) is mesh((2,))


def threads(_rank: int) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def refuse(rank: int) -> NoReturn:
    msg = f"rank {rank} refuses"
    raise ValueError(msg)


def fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        msg = "no luck"
        raise KeyError(msg)
    dist.all_reduce(torch.zeros(1))


def fail_after(rank: int, failing: int) -> int:
    if rank == failing:
        msg = "too late"
        raise ValueError(msg)
    return rank


def sleep_on(rank: int, sleeper: int) -> int:
    if rank == sleeper:
        time.sleep(600)
    return rank


def end_on(rank: int, ending: int) -> None:
    if rank == ending:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def unpicklable(rank: int) -> object:
    return lambda: rank


def test_results_come_back_per_rank(pool: RankPool) -> None:
    results = pool.run(scale, torch.arange(3.0, dtype=torch.float64), 2.0)
    assert [r.tolist() for r in results] == [[0.0, 0.0, 0.0], [0.0, 2.0, 4.0], [0.0, 4.0, 8.0]]
    assert results[0].dtype == torch.float64


def test_processes_are_kept_between_calls(pool: RankPool) -> None:
    assert pool.run(process_id) == pool.run(process_id)


def test_first_ranks_only(pool: RankPool) -> None:
    assert [rank for rank, _ in pool.run(process_id, ranks=2)] == [0, 1]


@pytest.mark.parametrize(("shape", "total"), [((1,), 1.0), ((2,), 3.0), ((3,), 6.0)])
def test_mesh_spans_the_first_ranks(pool: RankPool, shape: tuple[int, ...], total: float) -> None:
    results = pool.run(sum_over_mesh, shape, ranks=shape[0])
    assert results == [(total, ("w",))] * shape[0]


def test_mesh_is_cached(pool: RankPool) -> None:
    assert pool.run(same_mesh) == [True, True, True]


def test_unknown_mesh_is_refused_and_says_how_to_get_it(pool: RankPool) -> None:
    with pytest.raises(WorkerError, match=r"no mesh of shape \(3, 1\), only .*RankPool\(\.\.\., meshes=\[\(3, 1\)\]\)"):
        pool.run(sum_over_mesh, (3, 1))


def test_one_thread_per_rank(pool: RankPool) -> None:
    assert pool.run(threads) == [(1, "1")] * 3


def test_failure_of_every_rank_names_each_and_keeps_the_processes(pool: RankPool) -> None:
    before = pool.run(process_id)
    with pytest.raises(WorkerError, match="3 of 3 ranks failed in 'refuse'") as caught:
        pool.run(refuse)
    assert {rank: c.message for rank, c in caught.value.causes.items()} == {r: f"rank {r} refuses" for r in range(3)}
    assert all(c.type_name == "ValueError" and "in refuse" in c.traceback for c in caught.value.causes.values())
    assert caught.value.stacks == {}
    assert pool.run(process_id) == before


def test_failure_of_one_rank_does_not_wait_for_the_timeout(pool: RankPool) -> None:
    before = pool.run(process_id)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1: KeyError: 'no luck'") as caught:
        pool.run(fail_on, 1)
    assert time.monotonic() - start < 20
    assert 1 in caught.value.causes
    assert set(caught.value.causes) | set(caught.value.stacks) == {0, 1, 2}
    after = pool.run(process_id)
    assert not {pid for _, pid in before} & {pid for _, pid in after}, "ranks out of step must be started anew"


@pytest.mark.nightly
def test_failure_of_one_rank_restarts_even_if_the_others_returned(pool: RankPool) -> None:
    before = pool.run(process_id)
    with pytest.raises(WorkerError, match="1 of 3 ranks failed") as caught:
        pool.run(fail_after, 2)
    assert list(caught.value.causes) == [2]
    assert not {pid for _, pid in before} & {pid for _, pid in pool.run(process_id)}


def test_hang_names_the_rank_shows_its_stack_and_restarts(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"ranks \[1\] of 3 did not answer in 'sleep_on' within 1 s") as caught:
        pool.run(sleep_on, 1, timeout_s=1)
    assert time.monotonic() - start < 20
    assert list(caught.value.stacks) == [1]
    assert "sleep_on" in caught.value.stacks[1]
    assert pool.run(sum_over_mesh, (3,)) == [(6.0, ("w",))] * 3


def test_ended_process_is_named_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(WorkerError, match="rank 2: ProcessEnded: the process ended with exit code 7"):
        pool.run(end_on, 2)
    assert [rank for rank, _ in pool.run(process_id)] == [0, 1, 2]


def test_result_that_cannot_be_sent_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(WorkerError, match="3 of 3 ranks failed in 'unpicklable'"):
        pool.run(unpicklable)


def test_function_that_cannot_be_sent_is_refused(pool: RankPool) -> None:
    with pytest.raises(FxShardError, match="give a top-level function"):
        pool.run(lambda rank: rank)


@pytest.mark.parametrize("ranks", [0, 4])
def test_ranks_out_of_range(pool: RankPool, ranks: int) -> None:
    with pytest.raises(FxShardError, match=f"between 1 and world_size=3, got {ranks}"):
        pool.run(process_id, ranks=ranks)


def test_arguments_are_checked() -> None:
    with pytest.raises(FxShardError, match="world_size must be at least 1, got 0"):
        RankPool(0)
    with pytest.raises(FxShardError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        RankPool(2, device="tpu")
    with pytest.raises(FxShardError, match=r"mesh shapes \[\(2, 2\)\] do not fit"):
        RankPool(3, meshes=[(2,), (2, 2)])


def test_default_meshes() -> None:
    assert default_meshes(3) == ((1,), (2,), (3,))
    assert default_meshes(4)[-1] == (2, 2)


@pytest.mark.nightly
def test_closed_pool_starts_again() -> None:
    with RankPool(1) as pool:
        first = pool.run(process_id)
        pool.close()
        assert pool.run(process_id)[0][1] != first[0][1]
        environment = {key: os.environ.get(key) for key in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")}
    assert "lo" not in environment.values(), "the caller's environment is not changed"

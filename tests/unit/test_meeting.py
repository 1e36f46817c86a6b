"""Ranks that meet are told the same, whoever comes when; here they are threads on one store."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from fxshard import meeting
from fxshard.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 3
A, B = {"shape": "8"}, {"shape": "9"}
Words = dict[str, str]


class Ranks:
    """Threads that meet as ranks do, each with its own count of meetings."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.local = store, threading.local()
        self.numbers: list[dict[tuple[int, ...], int]] = [{tuple(range(RANKS)): 0} for _ in range(RANKS)]
        self.first_kept: list[dict[tuple[int, ...], int]] = [{tuple(range(RANKS)): 0} for _ in range(RANKS)]
        self.told: list[dict[tuple[int, ...], list[int]]] = [{tuple(range(RANKS)): []} for _ in range(RANKS)]

    def meet(self, *comes: Callable[[], Any]) -> list[Any]:
        """Return what each rank gets of its function."""

        def run(rank: int) -> Any:
            self.local.rank = rank
            return comes[rank]()

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(run, range(RANKS)))


class PerRank(dict[Any, Any]):
    """A dictionary of which every thread has its own."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name

    def __getitem__(self, key: Any) -> Any:
        return getattr(self.ranks, self.name)[self.ranks.local.rank][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        getattr(self.ranks, self.name)[self.ranks.local.rank][key] = value


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    found = Ranks(store)
    # a client waits on its connection, so every thread has one of its own
    clients = [dist.TCPStore("127.0.0.1", store.port, None, is_master=False) for _ in range(RANKS)]
    monkeypatch.setattr(meeting, "_get_default_store", lambda: clients[found.local.rank])
    monkeypatch.setattr(dist, "get_rank", lambda: found.local.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(meeting, "_numbers", PerRank(found, "numbers"))
    monkeypatch.setattr(meeting, "_told", PerRank(found, "told"))
    monkeypatch.setattr(meeting, "_first_kept", PerRank(found, "first_kept"))
    monkeypatch.setattr(meeting, "GRACE_S", 1.0)
    return found


def comes(words: Words, after_s: float = 0.0, timeout_s: float = 10.0) -> Callable[[], list[Words] | None]:
    def come() -> list[Words] | None:
        time.sleep(after_s)
        return Meeting(None, words).differing(timeout_s)

    return come


@pytest.mark.parametrize("late", range(RANKS))
def test_who_says_the_same_is_told_nothing(ranks: Ranks, late: int) -> None:
    for _ in range(3):
        assert ranks.meet(*(comes(A, 0.1 * (rank == late)) for rank in range(RANKS))) == [None] * RANKS


@pytest.mark.parametrize("order", list(itertools.permutations(range(RANKS))))
def test_all_are_told_of_one_that_differs_in_whatever_order_they_come(ranks: Ranks, order: tuple[int, ...]) -> None:
    words = [A, B, A]
    found = ranks.meet(*(comes(words[rank], 0.1 * place) for rank, place in enumerate(order)))
    assert found == [words] * RANKS
    assert ranks.meet(*[comes(A)] * RANKS) == [None] * RANKS


def test_who_leaves_is_heard_before_and_after(ranks: Ranks) -> None:
    failed = {"failed": "no memory"}

    def leave() -> None:
        time.sleep(0.1)
        Meeting(None, failed).leave(failed)

    found = ranks.meet(comes(A), leave, comes(A, 0.2))
    assert found == [[A, failed, A], None, [A, failed, A]]


def test_who_is_late_hears_of_all_that_others_left_and_is_in_step_again(ranks: Ranks) -> None:
    failed = {"failed": "no memory"}

    def leave_twice() -> list[Words] | None:
        for _ in range(2):
            Meeting(None, failed).leave(failed)
        return Meeting(None, A).differing(10.0)

    def come_late() -> list[Words] | None:
        time.sleep(0.3)
        for _ in range(2):
            assert failed in (Meeting(None, A).differing(0.5) or [])
        return Meeting(None, A).differing(10.0)

    assert ranks.meet(leave_twice, leave_twice, come_late) == [None] * RANKS


def test_meetings_that_all_leave_are_taken_away_at_the_next_one(ranks: Ranks) -> None:
    counts = []
    for _ in range(4):
        ranks.meet(*[lambda: Meeting(None, A).leave(A)] * RANKS)
        assert ranks.meet(*[comes(A)] * RANKS) == [None] * RANKS
        counts.append(ranks.store.num_keys())
    assert counts[1] == counts[-1]


def test_who_comes_too_late_goes_nowhere(ranks: Ranks) -> None:
    first, second, late = ranks.meet(comes(A, timeout_s=0.2), comes(A, timeout_s=0.2), comes(A, 2.5))
    assert first == second == [A, A, {}]
    assert late == [A, A, A]
    assert ranks.meet(*[comes(A)] * RANKS) == [None] * RANKS


def test_all_hear_what_each_tells_and_keys_do_not_pile_up(ranks: Ranks) -> None:
    def tell() -> list[Words]:
        found = Meeting(None, A)
        assert found.differing(10.0) is None
        return found.told({"rank": str(ranks.local.rank)}, 10.0)

    counts = []
    for _ in range(6):
        assert ranks.meet(*[tell] * RANKS) == [[{"rank": str(rank)} for rank in range(RANKS)]] * RANKS
        counts.append(ranks.store.num_keys())
    assert counts[2] == counts[-1]

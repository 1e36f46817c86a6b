"""Says what every rank is doing when a collective is stuck: one thread a mesh, that looks at the stacks now and then.

::

    rank 0   in a collective that does not end  --calls-->  store  <--looks--   rank 1   anywhere
             <--------------- each rank's account of where it is --------------->
             the report: in the log of each rank, and in the error that ends the collective

It needs no collective and no cooperation of the threads that hang.  What ends a collective is the timeout of its
process group: gloo raises in each rank, NCCL ends the process.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxshard._torch import _get_default_store, collectives_started, group_timeout
from fxshard.meeting import digest
from fxshard.whereabouts import collective, is_in_collective, user_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")
STUCK_S = 60.0
"""A collective that takes longer is reported, or half of its group's timeout if that is less."""
LONGEST_PERIOD_S, SHORTEST_PERIOD_S, SHORTEST_GRACE_S = 5.0, 0.2, 1.0
_watchdogs: dict[tuple[int, ...], Watchdog] = {}


class Watchdog:
    """Watches the collectives of a mesh from a thread of its own.

    Args:
        mesh: The spatial mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.report = ""
        """Where the ranks were in the last collective that did not end; nothing once the next one begins."""
        self._ranks = tuple(int(r) for r in mesh.mesh.flatten())
        self._patience_s = min(STUCK_S, _shortest_timeout_s(mesh) / 2)
        self._period_s = min(max(self._patience_s / 8, SHORTEST_PERIOD_S), LONGEST_PERIOD_S)
        self._calls = 0
        self._waits_in, self._since_s, self._told_of = 0, 0.0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fxshard watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._store = _get_default_store().clone()  # the other connection may be waiting
        self._thread.start()
        atexit.register(self.stop)

    @property
    def is_watching(self) -> bool:
        """Whether the thread runs: it ends with the store."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(timeout=2 * LONGEST_PERIOD_S)

    def _watch(self) -> None:
        while not self._end.wait(self._period_s):
            try:
                self._look()
            except dist.DistError as error:  # the rank that holds the store has ended
                log.debug("the watchdog ends: %s", error)
                return
            except Exception:
                log.warning("fxshard's watchdog ends: a stuck collective is not reported any more", exc_info=True)
                return

    def _look(self) -> None:
        """See whether this rank is in the same collective as before, and whether a rank called."""
        number = collectives_started() if is_in_collective() else 0
        if number != self._waits_in:
            self._waits_in, self._since_s = number, time.monotonic()
            self.report = "" if number else self.report  # who is out of the reported one may yet tell why it failed
        waited_s = time.monotonic() - self._since_s
        if number and number != self._told_of and waited_s > self._patience_s:
            self._told_of = number
            self._store.set(self._key("called"), "")
        if self._store.check([self._key("called")]):
            self._exchange(f"for {waited_s:.0f} s in {collective()}" if number else f"at {user_line()}")

    def _exchange(self, account: str) -> None:
        """Tell where this rank is, hear it of the others, and keep and log what they say."""
        self._store.set(self._key(dist.get_rank()), account)
        deadline = time.monotonic() + max(2 * self._period_s, SHORTEST_GRACE_S)
        accounts = {rank: self._account_of(rank, deadline - time.monotonic()) for rank in self._ranks}
        self._calls += 1
        lines = [f"  rank {rank}: {account}" for rank, account in accounts.items()]
        self.report = "a collective of the model does not end; the ranks are\n" + "\n".join(lines)
        log.warning("%s", self.report)

    def _account_of(self, rank: int, patience_s: float) -> str:
        key = self._key(rank)
        try:
            self._store.wait([key], timedelta(seconds=max(patience_s, SHORTEST_PERIOD_S)))
        except RuntimeError:
            return "silent: it ended, or its process is stopped"
        return self._store.get(key).decode()

    def _key(self, name: str | int) -> str:
        return f"fxshard/watchdog/{digest(self._ranks)}/{self._calls}/{name}"


def _shortest_timeout_s(mesh: DeviceMesh) -> float:
    found = [group_timeout(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    return min((t.total_seconds() for t in found if t is not None), default=2 * STUCK_S)


def watchdog(mesh: DeviceMesh) -> Watchdog:
    """Return the watchdog of the ranks of a mesh; it is started with the first call."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    found = _watchdogs.get(ranks)
    if found is None or not found.is_watching:
        found = _watchdogs[ranks] = Watchdog(mesh)
        if dist.get_backend() != "fake":  # which has nothing to wait for, and nowhere to tell
            found.start()
    return found

"""Ranks meet in the store that started the process group, and find out whether all came with the same words.

No collective is used: ranks that disagree must end in an error, not in a collective that waits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxshard._torch import _get_default_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")
GRACE_S = 3.0
"""How long a rank that knows of a difference waits to hear it from everyone."""
LONG_S = 60.0
"""After how long a rank says that it waits."""
NOT_ALL = (
    "warning of fxshard: this rank waits for %.0f s to run the model, and %d of %d ranks have come: the others ran out "
    "of batches, raised, or do work of their own. It waits %.0f s in all, the timeout of init_process_group"
)
GIVEN_UP = 2**32
"""What a rank that leaves adds to the count, so that nobody who comes later completes it."""
SAME, DIFFERENT = "same", "different"
"""What is written on a gate."""
_numbers: defaultdict[tuple[int, ...], int] = defaultdict(int)
"""How many meetings the ranks of a mesh had."""
_told: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
"""The numbers of the meetings from which words of this rank may still be in the store."""


def digest(parts: Iterable[object]) -> str:
    """Return a short hash of the parts' text."""
    joined = "\n".join(map(str, parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


class Meeting:
    """One meeting of the ranks of a mesh; their first one is the first of each, and so on.

    The last rank to come opens a gate, or the first that comes with other words does; four small requests a rank,
    however many ranks there are.  The keys of a meeting are

    =========  ===================================================
    ``first``  the hash of the words that the first rank came with
    ``count``  how many came with them
    ``gate``   whether all did
    0, 1, ...  the words of each rank of the mesh, where not
    =========  ===================================================

    Who comes to a meeting is done with the one before; the first to come to the second after it takes away its keys.

    Args:
        mesh: The spatial mesh; None for all ranks of the default process group.
        words: What this rank comes with: a name and a value for each thing.
    """

    def __init__(self, mesh: DeviceMesh | None, words: dict[str, str]) -> None:
        self.words = dict(words)
        self._ranks = tuple(range(dist.get_world_size())) if mesh is None else _ranks(mesh)
        self._place, self._store = self._ranks.index(dist.get_rank()), _get_default_store()
        self._number = _numbers[self._ranks]
        _numbers[self._ranks] += 1

    def differing(self, timeout_s: float) -> list[dict[str, str]] | None:
        """Return the words of each rank, in the mesh's order, empty where it did not come; None if all said the same.

        Args:
            timeout_s: How long to wait for the ranks, in seconds.

        Raises:
            RuntimeError: The rank that holds the store is gone.
        """
        mine = digest(sorted(self.words.items()))
        first, gate = self._store.compare_set(self._key("first"), "", mine).decode(), self._key("gate")
        came = self._store.add(self._key("count"), 1) if first == mine else 0
        if came == len(self._ranks):
            self._store.set(gate, SAME)
            return None
        if came == 1:
            self._take_away("first", "count", "gate")
        if came == 0 or not self._wait_and_say(gate, timeout_s):
            self._give_up()
        return None if self._store.get(gate).decode() == SAME else self.told(self.words, GRACE_S)

    def told(self, words: dict[str, str], timeout_s: float) -> list[dict[str, str]]:
        """Tell ``words``; return those of each rank, in the mesh's order, empty where it told none in time.

        Args:
            words: What this rank tells.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            RuntimeError: The rank that holds the store is gone.
        """
        self._tell(words)
        keys = [self._key(place) for place in range(len(self._ranks))]
        if self._wait(keys, timeout_s):
            return [json.loads(answer) for answer in self._store.multi_get(keys)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else {} for key in keys]

    def leave(self) -> None:
        """Tell the words to those that come, and wait for nobody.

        Raises:
            RuntimeError: The rank that holds the store is gone.
        """
        self._store.set(self._key("gate"), DIFFERENT)
        self._tell(self.words)

    def _wait_and_say(self, gate: str, timeout_s: float) -> bool:
        """Wait for a gate, and say so where it takes long; return whether it is open."""
        if timeout_s <= LONG_S:
            return self._wait([gate], timeout_s)
        if self._wait([gate], LONG_S):
            return True
        came = self._store.add(self._key("count"), 0)
        log.warning(NOT_ALL, LONG_S, came, len(self._ranks), timeout_s)
        return self._wait([gate], timeout_s - LONG_S)

    def _give_up(self) -> None:
        """Open the gate, unless all came meanwhile: then the last of them does."""
        if self._store.add(self._key("count"), GIVEN_UP) == GIVEN_UP + len(self._ranks):
            self._wait([self._key("gate")], GRACE_S)
        else:
            self._store.set(self._key("gate"), DIFFERENT)

    def _tell(self, words: dict[str, str]) -> None:
        told = _told[self._ranks]
        while told and told[0] < self._number - 1:
            self._store.delete_key(self._key(self._place, told.pop(0)))
        told.append(self._number)
        self._store.set(self._key(self._place), json.dumps(words))

    def _take_away(self, *names: str) -> None:
        for name in names:
            self._store.delete_key(self._key(name, self._number - 2))

    def _key(self, name: str | int, number: int | None = None) -> str:
        return f"fxshard/{_hash_of(self._ranks)}/{self._number if number is None else number}/{name}"

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait for keys; return whether they are there.

        Raises:
            RuntimeError: The rank that holds the store is gone.
        """
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # too late, or the store is gone
            return bool(self._store.check(keys))
        return True


@functools.lru_cache(maxsize=64)
def _hash_of(ranks: tuple[int, ...]) -> str:
    return digest(ranks)


@functools.lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(int(r) for r in mesh.mesh.flatten())

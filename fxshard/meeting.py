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
_first_kept: defaultdict[tuple[int, ...], int] = defaultdict(int)
"""The number of the first meeting whose keys may still be in the store."""
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

    Where all came, all are done with the meetings before: the last to come takes away their keys, and each rank its
    words.  A rank may leave several meetings before another comes to the first of them.

    Args:
        mesh: The spatial mesh; None for all ranks of the default process group.
        words: What this rank comes with: a name and a value for each thing.
    """

    def __init__(self, mesh: DeviceMesh | None, words: dict[str, str]) -> None:
        self.words = words
        self._ranks = ranks_of(mesh)
        self._place, self._store = self._ranks.index(dist.get_rank()), _get_default_store()
        self.number = _numbers[self._ranks]
        """Which meeting of these ranks it is: the same on all of them."""
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
        is_last = came == len(self._ranks)
        if is_last:
            self._store.set(gate, SAME)
        elif came == 0 or not self._wait_and_say(gate, timeout_s):
            self._give_up()
        if not is_last and self._store.get(gate).decode() != SAME:
            return self.told(self.words, GRACE_S)
        self._take_away(is_last=is_last)
        return None

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

    def leave(self, words: dict[str, str]) -> None:
        """Tell words to those that come, and wait for nobody.

        Args:
            words: What this rank tells.

        Raises:
            RuntimeError: The rank that holds the store is gone.
        """
        self._store.set(self._key("gate"), DIFFERENT)
        self._tell(words)

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
        _told[self._ranks].append(self.number)
        self._store.set(self._key(self._place), json.dumps(words))

    def _take_away(self, *, is_last: bool) -> None:
        """Take away this rank's words of earlier meetings, and as the last that came what all share of them."""
        told = _told[self._ranks]
        while told and told[0] < self.number:
            self._store.delete_key(self._key(self._place, told.pop(0)))
        for number in range(_first_kept[self._ranks], self.number if is_last else 0):
            for name in ("first", "count", "gate"):
                self._store.delete_key(self._key(name, number))
        _first_kept[self._ranks] = self.number

    def _key(self, name: str | int, number: int | None = None) -> str:
        return f"fxshard/{_hash_of(self._ranks)}/{self.number if number is None else number}/{name}"

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


def ranks_of(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Return the ranks of a mesh, in its order; of the default process group for None."""
    return tuple(range(dist.get_world_size())) if mesh is None else _ranks(mesh)


@functools.lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(int(r) for r in mesh.mesh.flatten())

"""Process groups: what they were made with, and how far they are."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import _world  # all process groups

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


def default_group_timeout() -> timedelta | None:
    """Return how long a collective of the default group waits, which its user chose; None where it does not say."""
    group = torch.distributed.group.WORLD
    return None if group is None else group_timeout(group)


def group_timeout(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """Return how long a collective of a process group waits; None where the group does not say."""
    device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def collectives_started() -> int:
    """Return how many collectives this process has started, in all groups whose backend counts them."""
    return sum(_collectives_of(group) for group in list(_world.pg_map))


def _collectives_of(group: torch.distributed.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # a backend that does not count
        return 0


class _Last:
    """Takes a place among the communicators that torch finalizes before it ends the process groups."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def finalize(self) -> None:
        self.call()


def before_groups_end(call: Callable[[], None]) -> None:
    """Have something called when ``destroy_process_group`` begins to end all groups, or Python ends without it."""
    if not any(isinstance(each, _Last) and each.call is call for each in _world.comms):
        _world.comms.append(_Last(call))
        atexit.unregister(call)
        atexit.register(call)


def group_exists(name: str) -> bool:
    """Return whether a process group of this name is there: it goes when the default group is destroyed."""
    return name in _world.pg_names.values()

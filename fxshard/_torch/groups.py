"""Process groups: what they were made with, and how far they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import _world  # all process groups

if TYPE_CHECKING:
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


def group_exists(name: str) -> bool:
    """Return whether a process group of this name is there: it goes when the default group is destroyed."""
    return name in _world.pg_names.values()

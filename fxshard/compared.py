"""Which parameters and buffers the ranks of a mesh have compared, and how they tell them from one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard._torch import WeakTensorKeyDictionary
from fxshard.meeting import digest, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

_compared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the ranks of each mesh that compared a tensor: the number of the comparison, and its place there."""


def were_compared(mesh: DeviceMesh | None, tensors: Iterable[object]) -> bool:
    """Return whether the values of all these tensors were compared on the ranks of a mesh.

    That is done once: later, kernels that add in no fixed order may have moved ranks apart by rounding.
    """
    ranks = ranks_of(mesh)
    return all(ranks in _compared.get(t, {}) for t in tensors if isinstance(t, torch.Tensor))


def identities(mesh: DeviceMesh | None, tensors: Iterable[object]) -> str:
    """Return a hash that tells these tensors from others whose values were compared on the ranks of a mesh."""
    ranks = ranks_of(mesh)
    return digest(_compared.get(t, {}).get(ranks) for t in tensors if isinstance(t, torch.Tensor))


def remember(mesh: DeviceMesh | None, tensors: Iterable[object], comparison: int) -> None:
    """Remember that all ranks of a mesh were found to hold the same values of these tensors.

    Args:
        mesh: Whose ranks.
        tensors: In the same order on all of them.
        comparison: Its number.
    """
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            _compared.setdefault(tensor, {}).setdefault(ranks_of(mesh), f"{comparison}, {place}")

"""The spatial mesh: what it has to be, and the default one.

The default mesh is all ranks of the default process group, started from torchrun's environment if need be.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard._torch import default_group_timeout, group_exists
from fxshard.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("fxshard")
AXIS = "spatial"
_summing: list[str] = []
"""The name of the process group that was made for gradient sums."""


def default_mesh() -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks.

    The default process group is started from torchrun's environment when it is not up: NCCL and this rank's GPU
    where there are GPUs, gloo elsewhere.  Without torchrun's environment the mesh has one rank.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        start_process_group(device)
    if dist.get_backend() == "gloo":
        device = "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=(AXIS,))


def check_mesh(mesh: DeviceMesh) -> None:
    """Check that a mesh says who this rank is, in the order in which its process groups number their ranks.

    One rank of a job of several may be meant to have images of its own, so a mesh of it alone is a warning only.

    Raises:
        PlanError: This rank is not in it, or twice, or the ranks along an axis do not ascend.
    """
    ranks = mesh.mesh.flatten().tolist()
    if len(set(ranks)) != len(ranks):
        msg = f"the mesh {mesh} has a rank more than once; give each rank one place"
        raise PlanError(msg)
    if mesh.get_coordinate() is None:
        msg = f"rank {dist.get_rank()} is not in the mesh of ranks {ranks}; transform the model on those ranks only, "
        msg += f"or with a mesh of all: {_of_all(mesh.device_type)}"
        raise PlanError(msg)
    if not _ascends(ranks, tuple(mesh.mesh.shape)):
        msg = (
            f"the ranks {mesh.mesh.tolist()} of the mesh do not ascend along each axis, as those of process groups do: "
            f"a rank would take another's part; use {sorted(ranks)} in the shape {tuple(mesh.mesh.shape)}"
        )
        raise PlanError(msg)
    if len(ranks) == 1 and dist.is_initialized() and dist.get_world_size() > 1:
        _warn_alone(ranks[0], mesh.device_type)


@functools.cache  # once for each mesh, not for each compilation
def _warn_alone(rank: int, device: str) -> None:
    text = "the mesh has 1 rank of %d: rank %d runs the whole model alone, and nothing is split; a mesh of all is %s"
    log.warning(text, dist.get_world_size(), rank, _of_all(device))


def _of_all(device: str) -> str:
    return f"init_device_mesh({device!r}, ({dist.get_world_size()},))"


def _ascends(ranks: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Return whether ranks, in the order of a mesh of this shape, ascend along each of its axes."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return all(
        ranks[place] < ranks[place + stride]
        for stride, size in zip(strides, shape, strict=True)
        for place in range(len(ranks))
        if place // stride % size < size - 1
    )


def news_level(mesh: DeviceMesh | None) -> int:
    """Return the level of news for the log: a warning on the first rank of a mesh, which speaks for all.

    Args:
        mesh: The spatial mesh; None for all ranks of the default process group.
    """
    coords = (dist.get_rank() if dist.is_initialized() else 0,) if mesh is None else mesh.get_coordinate()
    return logging.INFO if any(coords or ()) else logging.WARNING


def start_process_group(device: str) -> None:
    """Start the default group from torchrun's environment, or one of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def summing_groups(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the process groups that gradients are summed over.

    In the group of an axis a halo exchange would wait behind a sum of gradients, because the operations of a group run
    one after the other on a GPU; so a mesh of all ranks has a group for the sums, which also serves several axes at
    once.  A part of the ranks cannot make one alone.

    Args:
        mesh: The spatial mesh; every rank calls this at the same point.
        names: The groups of the axes to sum over.

    Returns:
        Names of groups to sum over, one after the other.
    """
    covers_world = len(names) == mesh.ndim and mesh.size() == dist.get_world_size()
    if not covers_world or (mesh.ndim == 1 and mesh.device_type == "cpu") or dist.get_backend() == "fake":
        return names
    if not (_summing and group_exists(_summing[0])):
        made = dist.new_group(timeout=default_group_timeout(), group_desc="fxshard gradient sums")
        assert isinstance(made, dist.ProcessGroup), "every rank is in it"
        _summing[:] = [made.group_name]
    return (_summing[0],)

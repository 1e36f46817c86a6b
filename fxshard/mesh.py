"""The default mesh: all ranks of the default process group, started from torchrun's environment if need be."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXIS = "spatial"


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


def start_process_group(device: str) -> None:
    """Start the default group from torchrun's environment, or one of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

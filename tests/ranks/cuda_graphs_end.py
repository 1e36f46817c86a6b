"""Trains with collectives in CUDA graphs, on two NCCL ranks that share a GPU or have one each, and ends.

    torchrun --nproc-per-node 2 -m tests.ranks.cuda_graphs_end destroy

``destroy`` ends the process groups itself, ``leave`` leaves that to Python, ``forget`` is what happens without
fxshard's care.  A rank that comes to its end says so.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import Shard

import fxshard
from fxshard.rank_process import take_gpu

STEPS = 5


def main(end: str) -> None:
    """Train for some steps, the last of which are replayed, and end in one of the ways."""
    take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    net = fxshard.transform(net, mesh=mesh, placements=[Shard(3)], mode="reduce-overhead")
    for _ in range(STEPS):
        net.zero_grad(set_to_none=True)
        net(torch.ones(1, 3, 16, 32, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    if end == "forget":
        _world.comms.clear()
    if end in {"destroy", "forget"}:
        dist.destroy_process_group()
    sys.stdout.write(f"rank {os.environ['RANK']} came to its end\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

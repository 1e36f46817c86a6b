"""Go on after a rank has died: torchrun starts all ranks anew, and they take up the last checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic.py                # leaves elastic.pt
    torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic.py --die-at 3     # to see it

The parameters at the end are the same, to the bit.  Without the variable all lives share torchrun's store, and ranks
find the addresses of the dead in it (pytorch/pytorch#135712).
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fxshard

STEPS = 5


def save(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint at once: who dies while writing leaves the one before."""
    written = checkpoint.with_suffix(".written")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, written)
    written.replace(checkpoint)


def load(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the step to go on with, 0 without a checkpoint."""
    if not checkpoint.exists():
        return 0
    found = torch.load(checkpoint, map_location=next(net.parameters()).device)
    net.load_state_dict(found["net"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"]) + 1


def train(mesh: DeviceMesh, checkpoint: Path, steps: int = STEPS, die_at: int | None = None) -> None:
    """Train from the checkpoint on, if there is one; rank 1 may die in the middle of a step of its first life."""
    backend = "inductor" if mesh.device_type == "cuda" else "eager"
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)).to(mesh.device_type)
    net = fxshard.transform(net, mesh=mesh, placements=[Shard(3)], inner_backend=backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(load(checkpoint, net, optimizer), steps):
        torch.manual_seed(step)  # batch and dropout depend on the step alone: a step that is done again is the same
        images, labels = torch.randn(2, 3, 32, 96), torch.randint(4, (2,))
        loss = nn.functional.cross_entropy(net(images.to(mesh.device_type)), labels.to(mesh.device_type))
        if step == die_at and mesh.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {mesh.get_rank()} step {step} loss {loss.item():.6f}", flush=True)
        if mesh.get_rank() == 0:
            save(checkpoint, net, optimizer, step)


def main() -> None:
    """Train on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic.pt"), help="written after every step")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="rank 1 dies in this step, once")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("width",))
    train(mesh, arguments.checkpoint, die_at=arguments.die_at)


if __name__ == "__main__":
    main()

"""Four ranks, two by two: each pair shares its images' width, and the pairs have images of their own (DDP)."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fxshard

STEPS, IMAGES = 3, 2


def main() -> None:
    """Train some steps; DDP averages the gradients of the pairs."""
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "width"))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 5, 2, 2), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).to(device)
    split = fxshard.transform(net, mesh=mesh["width"], placements=[Shard(3)], inner_backend=backend)
    model = DistributedDataParallel(split, process_group=mesh.get_group("data"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = mesh.get_local_rank("data")
    generator = torch.Generator().manual_seed(pair)  # both ranks of a pair have the same images
    images = torch.randn(IMAGES, 3, 32, 128, generator=generator).to(device)
    labels = torch.randint(4, (IMAGES,), generator=generator).to(device)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"pair {pair} step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

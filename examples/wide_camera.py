"""Train timm's ConvNeXt on photographs that are too wide for one GPU: each rank has some of the columns."""

import os

import skimage
import timm
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard

STEPS, HEIGHT, WIDTH = 3, 64, 512


def photographs() -> tuple[Tensor, Tensor]:
    """Return three wide images (3, 3, HEIGHT, WIDTH) and their labels."""
    found = [skimage.data.astronaut(), skimage.data.coffee(), skimage.data.cat()]
    images = [torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255 for image in found]
    wide = [torch.nn.functional.interpolate(image, (HEIGHT, WIDTH)) for image in images]
    return torch.cat(wide), torch.arange(len(wide))


def main() -> None:
    """Train some steps; every rank prints the same losses."""
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("width",))
    torch.manual_seed(0)  # the same weights and drop paths on every rank
    net = timm.create_model("convnext_atto", num_classes=3, drop_path_rate=0.2).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net = fxshard.transform(net, mesh=mesh, placements=[Shard(3)], inner_backend=backend)
    images, labels = (x.to(device) for x in photographs())  # whole on every rank; each takes its columns
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {mesh.get_rank()} step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

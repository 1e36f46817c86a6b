"""Segment photographs with a U-Net: each rank reads only its columns, and the map of classes stays where it is."""

import os

import skimage
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fxshard

STEPS, HEIGHT, WIDTH, CLASSES = 4, 64, 256, 2


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return convolution, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels, in plain PyTorch: it knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.pool = block(3, 8), block(8, 16), nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Sequential(block(16, 8), nn.Conv2d(8, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, CLASSES, H, W) for images (N, 3, H, W)."""
        fine = self.fine(x)
        logits: Tensor = self.head(torch.cat([fine, self.up(self.coarse(self.pool(fine)))], 1))
        return logits


def columns(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of two photographs, and of their labels: is a pixel bright?"""
    found = [skimage.data.astronaut(), skimage.data.coffee()]
    images = [torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255 for image in found]
    whole = torch.cat([nn.functional.interpolate(image, (HEIGHT, WIDTH)) for image in images])
    part = whole[..., rank * WIDTH // ranks : (rank + 1) * WIDTH // ranks]
    return part, (part.mean(1) > 0.5).long()


def main() -> None:
    """Train some steps; the loss is that of all pixels, the same on every rank."""
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("width",))
    torch.manual_seed(0)
    net = UNet().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net = fxshard.transform(
        net, mesh=mesh, placements=[Shard(3)], inner_backend=backend, inputs="local", outputs="local"
    )
    images, labels = (x.to(device) for x in columns(mesh.get_rank(), mesh.size()))
    all_labels = DTensor.from_local(labels, mesh, [Shard(2)])
    for step in range(STEPS):
        logits = net(images)  # a DTensor: this rank has its columns
        loss = nn.functional.cross_entropy(logits, all_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        print(f"rank {mesh.get_rank()} step {step} loss {value.item():.6f}")


if __name__ == "__main__":
    main()

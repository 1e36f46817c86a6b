"""Train a 3-D U-Net on a volume that is split over four ranks: halves of the depth, halves of the width."""

import skimage
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard

STEPS, SIZE = 3, 32


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return convolution, instance norm and leaky ReLU, as nnU-Net has them."""
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs), nn.LeakyReLU())


class UNet3D(nn.Module):
    """Two levels; the way up is trilinear."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.down, self.coarse = block(1, 4), nn.Conv3d(4, 8, 3, stride=2, padding=1), block(8, 8)
        self.up = nn.Upsample(scale_factor=2, mode="trilinear")
        self.head = nn.Sequential(block(12, 4), nn.Conv3d(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 1, D, H, W) for a volume of that shape."""
        fine = self.fine(x)
        logits: Tensor = self.head(torch.cat([fine, self.up(self.coarse(self.down(fine)))], 1))
        return logits


def main() -> None:
    """Train some steps: tell blobs from what lies between them, in noise."""
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("depth", "width"))
    torch.manual_seed(0)
    net = UNet3D().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net = fxshard.transform(net, mesh=mesh, placements=[Shard(2), Shard(4)], inner_backend=backend)
    blobs = torch.from_numpy(skimage.data.binary_blobs(SIZE, n_dim=3, rng=0))[None, None].float().to(device)
    volume = blobs + torch.randn(blobs.shape).to(device)
    for step in range(STEPS):
        loss = nn.functional.binary_cross_entropy_with_logits(net(volume), blobs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {torch.distributed.get_rank()} step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

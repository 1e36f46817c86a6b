"""Decode a large image with a VAE's decoder, in inference: the image is split over the ranks from the latent on."""

import os

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard

CHANNELS, HEIGHT, WIDTH = 16, 16, 48


class Residual(nn.Module):
    """Group norm, SiLU and convolution, twice, as in latent diffusion."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = (nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        again = (nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.body = nn.Sequential(*parts, *again)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the body adds to it."""
        y: Tensor = x + self.body(x)
        return y


def decoder() -> nn.Sequential:
    """Return a decoder from latents (N, 4, h, w) to images (N, 3, 4h, 4w)."""
    layers: list[nn.Module] = [nn.Conv2d(4, CHANNELS, 3, padding=1), Residual(CHANNELS)]
    for _ in range(2):
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), Residual(CHANNELS)]
    return nn.Sequential(*layers, nn.GroupNorm(4, CHANNELS), nn.SiLU(), nn.Conv2d(CHANNELS, 3, 3, padding=1))


@torch.no_grad()
def main() -> None:
    """Decode one latent on all ranks, and compare with the untouched decoder, which fits at this size."""
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("width",))
    torch.manual_seed(0)
    untouched = decoder().to(device).eval()
    latent = torch.randn(1, 4, HEIGHT, WIDTH).to(device)
    net = fxshard.transform(untouched, mesh=mesh, placements=[Shard(3)], inner_backend=backend, outputs="local")
    image = net(latent)  # a DTensor: each rank keeps its columns
    print(f"rank {mesh.get_rank()} has {tuple(image.to_local().shape)} of {tuple(image.shape)}")
    error = (image.full_tensor() - untouched(latent)).abs().max().item()
    print(f"rank {mesh.get_rank()} differs by {error:.1e}")


if __name__ == "__main__":
    main()

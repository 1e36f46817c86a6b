"""Networks that tests and tools run and no library that they need has: the U-Net, of any number of dimensions."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS: dict[int, tuple[Any, Any, Any, Any]] = {
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d),
}
"""Convolution, norm, pool and transposed convolution, by spatial dimensions."""


def made_by(module: str, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Return the model that a function of a library's module makes; the library is imported when it is asked for."""
    made: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return made


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015; Cicek et al., 2016) with padded convolutions and batch norms.

    Args:
        dims: Spatial dimensions, 2 or 3.
        width: Channels of the finest level; each deeper one has twice as many.
        levels: How many, the finest among them.
        inputs: Channels of the image.
        classes: Channels of the result.

    Example:
        >>> UNet(2, width=2, levels=3)(torch.zeros(1, 3, 8, 16)).shape
        torch.Size([1, 2, 8, 16])
    """

    def __init__(self, dims: int, *, width: int = 64, levels: int = 5, inputs: int = 3, classes: int = 2) -> None:
        super().__init__()
        convolution, _, pool, transposed = CONVOLUTIONS[dims]
        sizes = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_block(dims, i, o) for i, o in zip((inputs, *sizes), sizes, strict=False))
        self.pool = pool(2)
        self.up = nn.ModuleList(transposed(o, i, 2, 2) for i, o in itertools.pairwise(sizes))
        self.join = nn.ModuleList(_block(dims, 2 * i, i) for i in sizes[:-1])
        self.head = convolution(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes, ...) for images (N, inputs, ...) whose sizes 2 ** (levels - 1) divides."""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([kept[level], self.up[level](x)], 1))
        logits: Tensor = self.head(x)
        return logits


def _block(dims: int, inputs: int, outputs: int) -> nn.Sequential:
    convolution, norm, _, _ = CONVOLUTIONS[dims]
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [convolution(channels, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers)

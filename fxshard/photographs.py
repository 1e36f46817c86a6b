"""Training images without a download: wide crops of the photographs that scikit-image ships.

Which photograph a crop is from is its label.  Crops, order and scaling come from a seed, so that every rank
makes the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import interpolate

from fxshard.errors import FxShardError
from fxshard.optional import load

if TYPE_CHECKING:
    from torch import Tensor

NAMES = (
    "coffee.png",
    "astronaut.png",
    "chelsea.png",
    "motorcycle_left.png",
    "rocket.jpg",
    "hubble_deep_field.jpg",
)
"""Colour photographs among scikit-image's data files."""

LEAST_CROP = 0.7
"""The shortest crop, as a part of the largest one of its aspect."""


@dataclass(frozen=True)
class Photograph:
    """One photograph.

    Args:
        name: Its file's name without the suffix.
        pixels: (3, height, width), 0 to 255, ``uint8``.
    """

    name: str
    pixels: Tensor


def load_photographs() -> tuple[Photograph, ...]:
    """Return the photographs that the installed scikit-image has in its wheel.

    Raises:
        MissingPackageError: scikit-image is not installed.
        FxShardError: It has none of them.
    """
    folder = Path(load("skimage").__file__).parent / "data"
    files = [folder / name for name in NAMES if (folder / name).is_file()]
    if not files:
        msg = f"scikit-image has none of {', '.join(NAMES)} in {folder}; run: pip install -U scikit-image"
        raise FxShardError(msg)
    return tuple(Photograph(file.stem, _read(file)) for file in files)


def _read(file: Path) -> Tensor:
    numpy, image = load("numpy"), load("PIL.Image")  # both are scikit-image's own requirements
    with image.open(file) as opened:
        pixels = numpy.array(opened.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def make_batch(
    photographs: tuple[Photograph, ...], number: int, size: tuple[int, int, int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one training step.

    Args:
        photographs: What to crop; a label is a position in it.
        number: The step, >= 0; the next step goes on where this one ends.
        size: (batch, height, width) of the images.
        seed: Of the crops.

    Returns:
        ``float32`` images (batch, 3, height, width) from -1 to 1, and labels (batch,).
    """
    batch, height, width = size
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    labels = torch.arange(number * batch, (number + 1) * batch) % len(photographs)
    crops = [_crop(photographs[int(label)].pixels, height, width, generator) for label in labels]
    return torch.cat(crops), labels


def _crop(pixels: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return a random part of the wanted aspect, scaled to the wanted size."""
    draw = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    scale = min(pixels.shape[1] / height, pixels.shape[2] / width) * (LEAST_CROP + (1 - LEAST_CROP) * draw[0])
    rows, columns = (max(1, int(scale * length)) for length in (height, width))
    top, left = (
        int(d * (n - part + 1)) for d, n, part in zip(draw[1:], pixels.shape[1:], (rows, columns), strict=True)
    )
    part = pixels[None, :, top : top + rows, left : left + columns].float()
    scaled = interpolate(part, (height, width), mode="bilinear", antialias=True)
    return scaled / 127.5 - 1

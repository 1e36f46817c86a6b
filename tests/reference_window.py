"""What a window holds, by numpy: the reference that windows and exchanges are tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from fxshard.layout import Interval

MODES = ("constant", "reflect", "replicate", "circular")

_NUMPY_MODE: dict[str, Literal["constant", "reflect", "edge", "wrap"]] = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def sources(window: Interval, size: int, mode: str) -> list[int]:
    """Return the position that each position of the window reads, or -1 where it holds the constant."""
    lo, hi = window
    before, after = max(0, -lo), max(0, hi - size)
    positions = np.arange(size)
    if mode == "constant":
        padded = np.pad(positions, (before, after), constant_values=-1)
    else:
        padded = np.pad(positions, (before, after), mode=_NUMPY_MODE[mode])
    return [int(source) for source in padded[lo + before : hi + before]]

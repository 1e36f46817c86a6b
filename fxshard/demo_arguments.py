"""The arguments of ``fxshard demo``, apart from what they start: help needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.model_inputs import positive

if TYPE_CHECKING:
    import argparse

SPLITS, DTYPES = ("W", "H", "HW"), ("float64", "float32")
"""Keys of :data:`fxshard.demo_rank.SPLITS` and :data:`fxshard.demo_rank.DTYPES`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's arguments to ``parser``."""
    add, default = parser.add_argument, "(default: %(default)s)"
    names = "timm:NAME, torchvision:NAME, module:factory or timm's NAME"
    add("--model", default="timm:convnext_atto", help=f"{names} {default}")
    add("--world-size", type=positive, metavar="N", help="ranks to start (default: 2, or torchrun's)")
    add("--width", type=positive, default=512, help=f"of the images, in pixels {default}")
    add("--height", type=positive, default=64, help=f"of the images, in pixels {default}")
    add("--batch", type=positive, default=2, help=f"images per step {default}")
    add("--steps", type=positive, default=5, help=f"training steps {default}")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU for each rank)")
    add("--dtype", choices=DTYPES, default="float64", help=f"float64 tells a mistake from rounding {default}")
    add("--inner-backend", metavar="NAME", help="runs the rewritten graph (default: eager on cpu, inductor on cuda)")
    add("--split", type=_split, choices=SPLITS, default="W", help=f"the width, the height or both {default}")
    add("--plan", type=Path, default=Path("fxshard-plan.json"), help=f"where the plan is written {default}")
    add("--seed", type=int, default=0, help=f"of weights, crops and random draws {default}")


def _split(text: str) -> str:
    letters = text.upper().replace("X", "")
    return "HW" if letters == "WH" else letters

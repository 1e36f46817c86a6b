"""``fxshard plan``: what a model would hold and send on so many ranks, without any of them.

    fxshard plan timm:convnext_xlarge --input 7x3x512x8192 --world-size 8 --memory
    fxshard plan torchvision:resnet50 --input 2x3x1080x1920 --mesh 2x4 --split HW --save plan.dot plan.html

The model is built on the ``meta`` device where it can be, so its size does not matter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Shard

from fxshard.dry_run import plan
from fxshard.errors import PlanError
from fxshard.models import build_named, require_model
from fxshard.plan_files import WRITERS

if TYPE_CHECKING:
    from torch import nn

    from fxshard.dry_run import Plan

AXES = {3: "L", 4: "HW", 5: "DHW"}
"""The letters of the spatial dimensions, by the number of dimensions of an input."""


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of ``7x3x512x8192``.

    Raises:
        argparse.ArgumentTypeError: Something between the ``x`` is no size.
    """
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        msg = f"{text!r} is not of the form 7x3x512x8192"
        raise argparse.ArgumentTypeError(msg)
    return tuple(int(part) for part in parts)


def add_what_is_split(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model is split how."""
    parser.add_argument("model", help="timm:NAME, torchvision:NAME or module:factory")
    parser.add_argument("--input", type=sizes, required=True, help="shape of the whole batch, such as 7x3x512x8192")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=int, help="ranks, on one mesh axis")
    ranks.add_argument("--mesh", type=sizes, help="ranks on each mesh axis, such as 2x4")
    parser.add_argument("--split", help="what each mesh axis splits: W, H, HW, ...; default: the largest dimensions")


def add_what_is_planned(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`planned`."""
    add_what_is_split(parser)
    parser.add_argument("--eval", action="store_true", help="inference: evaluation mode, no gradients")
    parser.add_argument("--inner-backend", default="inductor", help="the backend whose memory it is")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_what_is_planned(parser)
    parser.add_argument("--memory", action="store_true", help="predict what the rank keeps, and the peak")
    parser.add_argument("--explain", metavar="NAME", nargs="+", default=[], help="nodes or modules to say more about")
    parser.add_argument(
        "--save", metavar="FILE", nargs="+", type=Path, default=[], help=" ".join((".txt", *WRITERS, ".py"))
    )


def planned(args: argparse.Namespace) -> Plan:
    """Return the plan that is asked for.

    Args:
        args: What :func:`add_what_is_planned` added, and ``command``.

    Raises:
        FxShardError: The model cannot be planned as asked.
    """
    shape, mesh = args.input, args.mesh or (args.world_size,)
    placements = None if args.split is None else [Shard(d) for d in split_dims(args.split, len(shape))]
    require_model(args.model)
    model = _build(args.model, args.command).train(not args.eval)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    image = torch.empty(shape, device=device)
    return plan(
        model, image, mesh_shape=mesh, placements=placements, training=not args.eval, inner_backend=args.inner_backend
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        FxShardError: The model cannot be planned as asked.
    """
    found = planned(args)
    print(found)
    if args.memory:
        print(f"\nmemory\n{found.memory}")
    for name in args.explain:
        print(f"\n{found.explain(name)}")
    for path in args.save:
        print(f"wrote {found.save(path, title=args.model)}")
    return 0


def split_dims(letters: str, ndim: int) -> list[int]:
    """Return the dimensions of an input of ``ndim`` dimensions that the letters name.

    Raises:
        PlanError: One of them it does not have.

    Example:
        >>> split_dims("HW", 4), split_dims("D", 5)
        ([2, 3], [2])
    """
    known = AXES.get(ndim, "")
    wrong = [letter for letter in letters.upper() if letter not in known]
    if wrong:
        msg = f"--split {letters}: an input of {ndim} dimensions has {' '.join(known) or 'no spatial one'}"
        raise PlanError(msg)
    return [known.index(letter) + 2 for letter in letters.upper()]


def _build(name: str, command: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_named(name, num_classes=1000)
    except (NotImplementedError, RuntimeError) as error:  # it reads values while it is built
        print(f"fxshard {command}: {name} is built in memory, on meta: {error}", file=sys.stderr)
        return build_named(name, num_classes=1000)

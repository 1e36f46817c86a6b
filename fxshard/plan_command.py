"""``fxshard plan``: what a model would hold and send on so many ranks, without any of them.

    fxshard plan timm:convnext_xlarge --input 7x3x512x8192 --world-size 8 --memory
    fxshard plan torchvision:resnet50 --input 2x3x1080x1920 --mesh 2x4 --split HW --save plan.dot plan.html

The model is built on the ``meta`` device where it can be, so its size does not matter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from fxshard.dry_run import Plan

AXES = {3: "L", 4: "HW", 5: "DHW"}
"""The letters of the spatial dimensions, by the number of dimensions of an input."""
ENDINGS = ".txt .json .dot .graphml .svg .html .py"
"""Of the files that a plan is saved as."""


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of ``7x3x512x8192``.

    Raises:
        argparse.ArgumentTypeError: Something between the ``x`` is no size >= 1.
    """
    parts = text.lower().split("x")
    if not all(part.isdigit() for part in parts):
        msg = f"{text!r} is not of the form 7x3x512x8192"
        raise argparse.ArgumentTypeError(msg)
    return tuple(positive(part) for part in parts)


def positive(text: str) -> int:
    """Return the number, >= 1.

    Raises:
        argparse.ArgumentTypeError: It is less, or none.
    """
    try:
        value = int(text)
    except ValueError as error:
        msg = f"invalid number: {text!r}"
        raise argparse.ArgumentTypeError(msg) from error
    if value < 1:
        msg = f"must be at least 1, got {value}"
        raise argparse.ArgumentTypeError(msg)
    return value


def add_what_is_split(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model is split how."""
    parser.add_argument("model", help="timm:NAME, torchvision:NAME or module:factory")
    parser.add_argument("--input", type=sizes, required=True, help="shape of the whole batch, such as 7x3x512x8192")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=positive, help="ranks, on one mesh axis")
    ranks.add_argument("--mesh", type=sizes, help="ranks on each mesh axis, such as 2x4")
    parser.add_argument("--split", help="what each mesh axis splits: W, H, HW, ... (default: the largest dimensions)")


def add_what_is_planned(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`planned`."""
    add_what_is_split(parser)
    parser.add_argument("--eval", action="store_true", help="inference: evaluation mode, no gradients")
    parser.add_argument("--inner-backend", default="inductor", help="the backend whose memory it is")
    parser.add_argument("--device", help="estimate times for it, choose the split, keep whole what is cheaper so: h200")
    parser.add_argument("--memory-limit-gib", type=float, help="what a rank may need at its peak")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_what_is_planned(parser)
    parser.add_argument("--memory", action="store_true", help="predict what the rank keeps, and the peak")
    parser.add_argument("--explain", metavar="NAME", nargs="+", default=[], help="nodes or modules to say more about")
    parser.add_argument("--save", metavar="FILE", nargs="+", type=Path, default=[], help=ENDINGS)


def planned(args: argparse.Namespace) -> Plan:
    """Return the plan that is asked for.

    Args:
        args: What :func:`add_what_is_planned` added, and ``command``.

    Raises:
        FxShardError: The model cannot be planned as asked.
    """
    import torch
    from torch.distributed.tensor import Shard

    from fxshard.dry_run import plan
    from fxshard.models import find_model

    shape = args.input
    placements = None if args.split is None else [Shard(d) for d in split_dims(args.split, len(shape))]
    find_model(args.model)
    model = _build(args.model, args.command).train(not args.eval)
    image = torch.empty(shape, device=next((p.device for p in model.parameters()), torch.device("cpu")))
    return plan(
        model,
        image,
        placements=placements,
        training=not args.eval,
        inner_backend=args.inner_backend,
        device=args.device,
        memory_limit_gib=args.memory_limit_gib,
        **_ranks(args),
    )


def _ranks(args: argparse.Namespace) -> dict[str, Any]:
    return {"world_size": args.world_size} if args.mesh is None else {"mesh_shape": args.mesh}


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        FxShardError: The model cannot be planned as asked.
    """
    from fxshard.dry_run import check_ending

    for path in args.save:
        check_ending(path)
    found = planned(args)
    explained = [found.explain(name) for name in args.explain]  # first: a name may be wrong
    print(found)
    if args.memory:
        print(f"\nmemory\n{found.memory}")
    for text in explained:
        print(f"\n{text}")
    for path in args.save:
        print(f"wrote {found.save(path, title=args.model)}")
    return 0


def split_dims(letters: str, ndim: int) -> list[int]:
    """Return the dimensions of an input of ``ndim`` dimensions that the letters name.

    Raises:
        PlanError: One of them it does not have.

    Example:
        >>> split_dims("HW", 4), split_dims("HxW", 4), split_dims("D", 5)
        ([2, 3], [2, 3], [2])
    """
    known, asked = AXES.get(ndim, ""), letters.upper().replace("X", "")
    if not asked or any(letter not in known for letter in asked):
        several = f", and {known[-2:]} for two mesh axes" if len(known) > 1 else ""
        msg = f"--split {letters}: an input of {ndim} dimensions has {' '.join(known) or 'no spatial one'}{several}"
        raise PlanError(msg)
    return [known.index(letter) + 2 for letter in asked]


def _build(name: str, command: str) -> nn.Module:
    import torch

    from fxshard.models import UnknownModelError, build_named

    try:
        with torch.device("meta"):
            return build_named(name, num_classes=1000)
    except UnknownModelError:
        raise
    except (NotImplementedError, RuntimeError) as error:  # it reads values while it is built
        print(f"fxshard {command}: {name} is built in memory, on meta: {error}", file=sys.stderr)
        return build_named(name, num_classes=1000)

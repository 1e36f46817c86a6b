"""``fxshard plan``: what a model would hold and send on so many ranks, without any of them.

    fxshard plan timm:convnext_xlarge --input 7x3x512x8192 --world-size 8 --memory
    fxshard plan torchvision:resnet50 --input 2x3x1080x1920 --mesh 2x4 --split HW --save plan.dot plan.html

The model is built on the ``meta`` device where it can be, so its size does not matter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.model_inputs import check_call, model_input, positive, sizes, split_dims

if TYPE_CHECKING:
    import argparse

    from torch import nn

    from fxshard.dry_run import Plan

ENDINGS = ".txt .json .dot .graphml .svg .html .py"
"""Of the files that a plan is saved as."""


def add_what_is_split(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model is split how."""
    parser.add_argument("model", help="timm:NAME, torchvision:NAME or module:factory")
    parser.add_argument(
        "--input",
        type=model_input,
        action="append",
        required=True,
        metavar="SHAPE",
        help="shape of the whole batch, such as 7x3x512x8192; again for each further argument of the model's forward, "
        "with its type behind a colon where that is not float32: 7x20:int64",
    )
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

    axes = len(args.mesh or (args.world_size,))
    placements = None if args.split is None else [Shard(d) for d in split_dims(args.split, args.input, axes)]
    find_model(args.model)
    model = _build(args.model, args.command).train(not args.eval)
    check_call(model, args.input)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return plan(
        model,
        [given.empty(device) for given in args.input],
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
    if args.memory or args.memory_limit_gib is not None:
        print(f"\nmemory\n{found.memory}")
    for text in explained:
        print(f"\n{text}")
    for path in args.save:
        print(f"wrote {found.save(path, title=args.model)}")
    return 0


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

"""``fxshard verify``: is this model, split over ranks, the untouched model?

    fxshard verify timm:resnet50 --input 2x3x224x448 --world-size 3 --split W
    fxshard verify my_package:make_net --input 1x1x32x64x64 --mesh 2x2 --split HW --bisect

Exit status 0 if it is on every rank, 1 if not.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.model_inputs import FLOATING, check_call, positive, split_dims
from fxshard.plan_command import add_what_is_split

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import torch
    from torch import nn

    from fxshard.model_inputs import ModelInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_what_is_split(parser)
    parser.add_argument("--dtype", nargs="+", choices=FLOATING, default=["float64"], help="default: float64")
    parser.add_argument("--steps", type=positive, default=2, help="training steps; default: 2")
    parser.add_argument("--inner-backend", default="eager", help="what compiles the rewritten graph; default: eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--eval", action="store_true", help="evaluation mode")
    parser.add_argument("--bisect", action="store_true", help="name the first node that differs")
    parser.add_argument("--json", type=Path, help="write the result here")


def run(args: argparse.Namespace) -> int:
    """Verify, print the table and return the exit status.

    Raises:
        FxShardError: The model cannot be run as asked.
    """
    from torch.distributed.tensor import Shard

    from fxshard.models import find_model
    from fxshard.verification import verify

    find_model(args.model)
    mesh = args.mesh or (args.world_size,)
    found = verify(
        functools.partial(_build, args.model, args.input, training=not args.eval),
        mesh_shape=mesh,
        placements=None if args.split is None else [Shard(d) for d in split_dims(args.split, args.input, len(mesh))],
        inner_backend=args.inner_backend,
        dtypes=args.dtype,
        steps=args.steps,
        training=not args.eval,
        device=args.device,
        bisect=args.bisect,
    )
    print(f"{args.model} {' '.join(map(str, args.input))}\n{found}")
    if args.json:
        args.json.write_text(found.to_json() + "\n")
    return 0 if found.exact else 1


def _build(name: str, inputs: Sequence[ModelInput], *, training: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from fxshard.models import build_named

    model = build_named(name, num_classes=10).train(training)
    check_call(model, inputs)
    return model, tuple(given.drawn() for given in inputs)

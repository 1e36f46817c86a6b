"""``fxshard bench``: one device and ranks at the same work, timed in one run.

fxshard bench timm:convnext_atto --input 2x3x64x128 --world-size 2 --split W --inner-backend aot_eager
fxshard bench timm:convnext_xlarge --input 7x3x512x1024 --world-size 2 --device cuda --dtype bf16 --json bench.json
fxshard bench --calibrate --world-size 2 --device cuda --json mine.json
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.model_inputs import model_input, positive, sizes, split_dims

if TYPE_CHECKING:
    import argparse

    from fxshard.bench import Row, Work
    from fxshard.workers import RankPool

ROWS = ("eager", "compiled", "checkpointed", "strong", "weak", "dtensor")
"""Keys of :data:`fxshard.bench.WAYS`."""
SERIES = ("compiled", "strong")
"""What a picture compares."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", nargs="?", help="timm:NAME, torchvision:NAME or module:factory")
    parser.add_argument(
        "--input",
        type=model_input,
        action="append",
        default=[],
        metavar="SHAPE",
        help="what one device trains on, such as 7x3x512x1024; again for each further argument of the model's forward",
    )
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=positive, help="ranks, on one mesh axis")
    ranks.add_argument("--mesh", type=sizes, help="ranks on each mesh axis, such as 2x4")
    parser.add_argument("--split", default="W", help="what each mesh axis splits: W, H, HW, ...; default: W")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what is compared; default: all")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast; default: fp32")
    parser.add_argument("--inner-backend", default="inductor", help="what compiles; default: inductor")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps; default: 10")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", action="store_true", help="fxshard's own kernels, too")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=positive,
        default=[],
        help="also train on images of these sizes along the first split",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory against --sizes, such as a.png")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--timeout-s", type=positive, default=1800, help="for one row, in seconds; default: 1800")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure device and link for the planner instead, --json for --device"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write.

    Raises:
        FxShardError: Arguments do not fit, or a rank failed.
    """
    import math

    import torch

    from fxshard.errors import PlanError
    from fxshard.optional import require
    from fxshard.workers import RankPool

    shape = args.mesh or (args.world_size,)
    if not args.calibrate and not (args.model and args.input):
        msg = "a model and --input SHAPE are needed, or --calibrate"
        raise PlanError(msg)
    if args.plot and not args.sizes:
        msg = f"--plot {args.plot}: --sizes says which sizes it shows, such as --sizes 1024 2048 4096"
        raise PlanError(msg)
    if args.plot:
        require("matplotlib")
    if args.device == "cuda" and (gpus := torch.cuda.device_count()) < math.prod(shape):
        msg = f"a rank is timed on a GPU of its own: {math.prod(shape)} ranks, and torch sees {gpus}; on fewer, "
        msg += "fxshard verify --device cuda compares results, and fxshard plan --device predicts times"
        raise PlanError(msg)
    work = None if args.calibrate else _work(args, shape)
    with RankPool(math.prod(shape), device=args.device, timeout_s=args.timeout_s, meshes=[shape]) as pool:
        return _calibrate(pool, args) if work is None else _compare(pool, work, args)


def _work(args: argparse.Namespace, shape: tuple[int, ...]) -> Work:
    from fxshard.bench import Work
    from fxshard.models import find_model

    find_model(args.model)
    dims = tuple(split_dims(args.split, args.input, len(shape)))
    options = {"kernels": args.kernels}
    return Work(
        args.model, tuple(args.input), shape, dims, args.dtype, args.inner_backend, args.steps, args.device, options
    )


def _compare(pool: RankPool, work: Work, args: argparse.Namespace) -> int:
    from fxshard.bench import run_row
    from fxshard.bench_text import plot, table, to_json

    rows = []
    for name in args.rows:
        rows.append(run_row(pool, work, name))
        print(f"{name}: {rows[-1].refusal or f'{rows[-1].ms:.1f} ms'}", file=sys.stderr, flush=True)
    print(f"{args.model}, {args.dtype}, {args.inner_backend}, forward and backward, {args.steps} steps")
    print("\n".join(table(rows)))
    series = [row for size in args.sizes for row in _of_size(pool, work, size)]
    if args.plot:
        plot(series, work.dims[0], args.plot)
        print(f"wrote {args.plot}")
    if args.json:
        command = shlex.join(["fxshard", *sys.argv[1:]])
        args.json.write_text(to_json(rows, work, command, series) + "\n")
        print(f"wrote {args.json}")
    return 0


def _of_size(pool: RankPool, work: Work, size: int) -> list[Row]:
    """Return the rows of a picture for one size of the image."""
    from fxshard.bench import run_row

    given = list(work.inputs[0].sizes)
    given[work.dims[0]] = size
    rows = [run_row(pool, work.sized(given), name) for name in SERIES]
    for row in rows:
        print(f"{row.name} {size}: {row.refusal or f'{row.ms:.1f} ms'}", file=sys.stderr, flush=True)
    return rows


def _calibrate(pool: RankPool, args: argparse.Namespace) -> int:
    from fxshard.calibration import measured_device

    device = measured_device(pool, args.json.stem if args.json else "measured")
    print(device)
    if args.json:
        args.json.write_text(device.to_json() + "\n")
        print(f"wrote {args.json}; fxshard plan ... --device {args.json}")
    return 0

"""``fxshard draw``: pictures and graph files of a plan, without any ranks.

fxshard draw timm:convnext_atto --input 2x3x64x256 --world-size 4 --out plan.html plan.svg
fxshard draw torchvision:resnet18 --input 2x3x224x448 --mesh 2x2 --split HW --stage local --out rank.html rank.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.errors import PlanError
from fxshard.plan_command import ENDINGS, add_what_is_planned, planned

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_what_is_planned(parser)
    stages = ("global", "local")
    parser.add_argument("--stage", choices=stages, default="global", help="the global graph, or the one rank's")
    parser.add_argument("--no-memory", action="store_true", help="without the memory, which takes some seconds")
    files = [Path("fxshard-plan.html")]
    parser.add_argument("--out", metavar="FILE", nargs="+", type=Path, default=files, help=ENDINGS)


def run(args: argparse.Namespace) -> int:
    """Write the files.

    Raises:
        FxShardError: The model cannot be planned as asked, or a file not be written.
    """
    from fxshard.dry_run import check_ending

    for path in args.out:
        check_ending(path)
        _check_folder(path)
    found = planned(args)
    for path in args.out:
        print(f"wrote {found.save(path, stage=args.stage, memory=not args.no_memory, title=args.model)}")
    return 0


def _check_folder(path: Path) -> None:
    """Refuse what cannot be written before the model is planned, which takes longer."""
    if not path.resolve().parent.is_dir():
        msg = f"there is no folder {path.parent} for {path.name}"
        raise PlanError(msg)

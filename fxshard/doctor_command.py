"""``fxshard doctor``: does this machine have what fxshard needs, and do two ranks on it agree with one device?

    fxshard doctor
    fxshard doctor --no-ranks --json found.json

Prints a row for each check.  Exit status 0 if nothing fails, 1 if something does; what only some uses miss is a
warning.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--no-ranks", action="store_true", help="start no ranks")
    parser.add_argument("--json", type=Path, help="write the findings here")


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    from fxshard import doctor

    findings = []
    for check in doctor.CHECKS if args.no_ranks else (*doctor.CHECKS, doctor.ranks):
        for finding in check():
            print(finding, flush=True)
            findings.append(finding)
    if args.json:
        args.json.write_text(json.dumps([asdict(f) for f in findings], indent=1) + "\n", encoding="utf-8")
    return 1 if any(f.verdict == "fails" for f in findings) else 0

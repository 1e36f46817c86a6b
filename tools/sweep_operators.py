"""Runs operators with options drawn at random on split images and compares each with one device.

    python tools/sweep_operators.py --count 5000 --seed 7 --jobs 2
    python tools/sweep_operators.py --configuration "Drawn(shape=(1, 2, 9), chain=(Op('roll', ...),), ...)"

Each configuration (``tests/operators``) is a chain of operators, an input shape and a split.  Outputs, gradients, and
buffers in float64 must equal those of the untouched operators on one device to 1e-9.  A mismatch is printed as text
that ``--configuration`` takes, together with a smaller one that fails as well.  Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is not installed

from fxshard.workers import RankPool
from tests.operators.configuration import MESHES, Drawn, draw
from tests.operators.family import Op
from tests.operators.packs import Finding, packs, run_pack, smallest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORLD_SIZE = 4


def sweep(drawn: Sequence[Drawn], *, shrink: bool) -> Iterator[Finding]:
    """Yield what is found of each configuration, failures made smaller, in one pool of ranks."""
    with RankPool(WORLD_SIZE, meshes=MESHES) as pool:
        for pack in packs(drawn):
            for finding in run_pack(pool, pack):
                if not finding.exact:
                    print(f"MISMATCH {finding.drawn}\n{finding.text}", flush=True)
                    finding = smallest(pool, finding) if shrink else finding
                    print(f"  smallest found: {finding.drawn}\n{finding.text}", flush=True)
                yield finding


def work(job: int, drawn: Sequence[Drawn], *, shrink: bool) -> list[Finding]:
    """Return the findings of one job and say how far it is."""
    findings: list[Finding] = []
    started, said = time.monotonic(), time.monotonic()
    for finding in sweep(drawn, shrink=shrink):
        findings.append(finding)
        if time.monotonic() - said > 20 or len(findings) == len(drawn):
            said = time.monotonic()
            failed = sum(not f.exact for f in findings)
            print(
                f"job {job}: {len(findings)} of {len(drawn)}, {failed} mismatches, {said - started:.0f} s", flush=True
            )
    return findings


def table(findings: Sequence[Finding]) -> str:
    """Return, for each family, how many configurations have it, how they ran and how many failed."""
    kinds = ("split", "partly", "gathered", "one rank")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        for name in {*finding.drawn.families, "all"}:
            rows[name].update((finding.kind, "runs"))
            rows[name]["mismatches"] += not finding.exact
    columns = ("runs", *kinds, "mismatches")
    lines = [f"{'family':<16}" + "".join(f"{column:>12}" for column in columns)]
    names = [*sorted(rows.keys() - {"all"}), *rows.keys() & {"all"}]
    lines += [f"{name:<16}" + "".join(f"{rows[name][column]:>12}" for column in columns) for name in names]
    return "\n".join(lines)


def gathers(findings: Sequence[Finding]) -> str:
    """Return the reasons for gathers, the most frequent first."""
    counted = Counter(reason.partition(":")[0] for finding in findings for reason in finding.reasons)
    return "\n".join(f"{count:>6}  {reason}" for reason, count in counted.most_common())


def main() -> int:
    """Run the sweep; exit status 1 if one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the index of the first configuration")
    parser.add_argument("--jobs", type=int, default=1, help="pools of four ranks at the same time")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for smaller ones")
    parser.add_argument("--configuration", help="run this one, as a mismatch was printed")
    args = parser.parse_args()
    if args.configuration:
        drawn = [eval(args.configuration, {"Drawn": Drawn, "Op": Op})]
    else:
        drawn = [draw(args.seed, index) for index in range(args.first, args.first + args.count)]
    print(f"seed {args.seed}, configurations {args.first} to {args.first + len(drawn) - 1}", flush=True)
    with ThreadPoolExecutor(args.jobs) as jobs:
        parts = [drawn[job :: args.jobs] for job in range(args.jobs)]
        futures = [jobs.submit(work, job, part, shrink=not args.no_shrink) for job, part in enumerate(parts)]
        findings = [finding for future in futures for finding in future.result()]
    failed = sum(not finding.exact for finding in findings)
    print(f"{table(findings)}\n\nGathered because\n{gathers(findings)}")
    print(f"\nseed {args.seed}: {len(findings)} configurations, {failed} mismatches")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

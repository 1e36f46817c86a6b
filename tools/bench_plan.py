"""Times plans of a large model for many ranks: seconds until it is captured and until it is planned, and the memory.

    python tools/bench_plan.py --json benchmarks/plan_convnext_xl_cpu.json

Each row is ``fxshard plan`` in a process of its own, as a user starts it, on two threads.  The times are those that it
logs (``TORCH_LOGS=fxshard``), the memory is the process's peak.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "fxshard plan timm:convnext_xlarge --input 7x3x512x8192 --world-size {ranks} --device h200"
RANKS = (8, 64, 1024)
TIMES = re.compile(r"was captured in (\d+\.\d) s and planned in (\d+\.\d) s")
ESTIMATE = re.compile(r"estimated step on \w+: (\d+\.\d+) ms, .*efficiency of (\d+) %")
MESH = re.compile(r"^\d+ ranks, mesh ([\d x]+);", re.MULTILINE)


def measured(ranks: int) -> dict[str, Any]:
    """Plan for so many ranks and return the row.

    Raises:
        RuntimeError: The command failed; with what it said.
    """
    command = COMMAND.format(ranks=ranks)
    environment = {**os.environ, "TORCH_LOGS": "fxshard", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as out:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], stdout=out, stderr=subprocess.STDOUT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        out.seek(0)
        said = out.read()
    times, estimate, mesh = TIMES.search(said), ESTIMATE.search(said), MESH.search(said)
    if process.returncode or not (times and estimate and mesh):
        msg = f"{command}: exit status {process.returncode}\n{said}"
        raise RuntimeError(msg)
    return {
        "ranks": ranks,
        "command": command,
        "capture_s": float(times[1]),
        "plan_s": float(times[2]),
        "command_s": round(seconds, 1),
        "peak_rss_gib": round(usage.ru_maxrss / 2**20, 2),
        "mesh": mesh[1],
        "estimated_step_ms": float(estimate[1]),
        "estimated_efficiency_percent": int(estimate[2]),
    }


def main() -> None:
    """Print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for ranks in args.ranks:
        rows.append(measured(ranks))
        print(rows[-1], flush=True)
    found = {
        "command": "python tools/bench_plan.py --json benchmarks/plan_convnext_xl_cpu.json",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; load before it {load:.2f}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "timm", "networkx")},
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Starts a script on CPU ranks, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE_S = 240


def environment() -> dict[str, str]:
    """Return the variables of a rank that imports what this process does, on one core."""
    paths = os.pathsep.join(p for p in sys.path if p)
    return os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def said_by_each_rank(
    script: Path, ranks: int, folder: Path, *, arguments: Sequence[str] = (), restarts: int = 0
) -> list[list[str]]:
    """Return the lines that each rank of ``torchrun`` printed, in each of its lives.

    Args:
        script: What is run.
        ranks: On how many ranks.
        folder: Where it runs; the ranks' logs are left there.
        arguments: Of the script.
        restarts: How often torchrun may start the ranks anew.
    """
    apart = ["--log-dir", "logs", "--redirects", "3"]  # in one pipe the ranks' lines mix
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}  # for each life
    ended = subprocess.run(
        [*torchrun, "--max-restarts", str(restarts), *apart, str(script), *arguments],
        cwd=folder,
        env=environment() | own_store,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [log.read_text().splitlines() for log in sorted((folder / "logs").rglob("stdout.log"))]

"""Starts a script on CPU ranks, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 240


def said_by_each_rank(script: Path, ranks: int, folder: Path) -> list[list[str]]:
    """Return the lines that each rank of ``torchrun`` printed.

    Args:
        script: What is run.
        ranks: On how many ranks.
        folder: Where it runs; the ranks' logs are left there.
    """
    paths = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    apart = ["--log-dir", "logs", "--redirects", "3"]  # in one pipe the ranks' lines mix
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*torchrun, *apart, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [log.read_text().splitlines() for log in (folder / "logs").rglob("stdout.log")]

"""A training over two hosts is that of one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ranks.hosts import WIRE, missing, two_hosts
from tests.ranks.test_composition import Setup, plainly
from tests.ranks.test_training_loops import build_with_modes
from tests.ranks.torchrun import PATIENCE_S, environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.hosts import Host

SCRIPT = Path(__file__).with_name("train_on_host.py")
PORT = 29500
"""Of the first host's own: nobody else is there."""


def by_hand(hosts: tuple[Host, Host], number: int) -> list[str]:
    """Return what starts the only rank of a host, as a cluster's scheduler does."""
    known = {"RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT}
    return hosts[number].command("env", *(f"{k}={v}" for k, v in known.items()), sys.executable, str(SCRIPT))


def by_torchrun(hosts: tuple[Host, Host], number: int) -> list[str]:
    """Return what starts the two ranks of a host."""
    where = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"]
    meet = ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    return hosts[number].command(sys.executable, "-m", "torch.distributed.run", *where, *meet, str(SCRIPT))


def run(commands: list[list[str]], folder: Path) -> None:
    """Run the hosts' commands at once, in ``folder``."""
    known = environment() | {"GLOO_SOCKET_IFNAME": WIRE}
    with (folder / "said.txt").open("w") as said:
        started = [subprocess.Popen(c, cwd=folder, env=known, stdout=said, stderr=said) for c in commands]
        try:
            ended = [process.wait(PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.terminate()
    assert ended == [0, 0], (folder / "said.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("start", "ranks"), [(by_hand, 2), pytest.param(by_torchrun, 4, marks=pytest.mark.nightly)])
def test_a_training_over_two_hosts_is_that_of_one_device(
    tmp_path: Path, start: Callable[[tuple[Host, Host], int], list[str]], ranks: int
) -> None:
    if reason := missing():
        pytest.skip(f"this machine has no namespaces for two hosts: {reason}")
    with two_hosts() as hosts:
        run([start(hosts, number) for number in range(len(hosts))], tmp_path)
    model = build_with_modes()
    torch.manual_seed(0)
    plainly(Setup(model, model))
    for rank in range(ranks):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-9, atol=1e-11)

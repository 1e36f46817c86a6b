"""Two hosts on one machine: Linux network namespaces with an address each, and a wire between them::

    host 0   192.0.2.1  wire -------- wire  192.0.2.2   host 1

Nothing else can be reached from either, and neither from elsewhere; the addresses are those of RFC 5737, which belong
to nobody.  A namespace lives as long as a process in it: here a ``cat``, which ends when its input is closed, so that
nothing is left behind, whatever becomes of the caller.  Root of a user namespace may do all this; not every machine
lets its users make one.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WIRE = "wire"
"""The name of the network interface on both hosts."""
NEW_USER = ("unshare", "--user", "--map-root-user")


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Args:
        pid: A process in it.
        address: On the wire.
    """

    pid: int
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` on this host."""
        return ["nsenter", "--target", str(self.pid), "--user", "--preserve-credentials", "--net", "--", *words]

    def run(self, *words: str) -> None:
        """Run a command that must succeed."""
        subprocess.run(self.command(*words), check=True)


def missing() -> str:
    """Return why this machine cannot have two hosts; empty if it can."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    made = [*NEW_USER, "--net", "ip", "link", "add", WIRE, "type", "veth"]
    return subprocess.run(made, capture_output=True, text=True, check=False).stderr.strip()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts; they are gone afterwards."""
    with ExitStack() as stack:
        first = Host(stack.enter_context(_kept_alive(*NEW_USER, "--net")), "192.0.2.1")
        of_same_user = first.command("unshare", "--net")
        second = Host(stack.enter_context(_kept_alive(*of_same_user)), "192.0.2.2")
        wire = ("ip", "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(second.pid))
        first.run(*wire)
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", WIRE)
            for interface in ("lo", WIRE):
                host.run("ip", "link", "set", interface, "up")
        yield first, second


@contextmanager
def _kept_alive(*entering: str) -> Iterator[int]:
    """Yield the id of a process that does nothing in the namespaces that the command enters."""
    with subprocess.Popen([*entering, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("there\n")
        process.stdin.flush()
        assert process.stdout.readline() == "there\n", f"{' '.join(entering)} failed"
        yield process.pid
        process.stdin.close()

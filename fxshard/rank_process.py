"""The inside of one rank process of a :class:`fxshard.workers.RankPool`.

The process joins the group, builds the device meshes, and then answers calls until it is told to stop::

    pool                                   rank
    Seat               -- at the start -->  join the group, build the meshes
                       <-- Result(None) --
    encode((path, encode((fn, args)))) -->  fn(rank, *args)
                       <-- Result(value) or Failure
    STOP               ----------------->   leave
"""

from __future__ import annotations

import faulthandler
import io
import math
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import FxShardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Shape = tuple[int, ...]

MESH_DIM_NAMES: dict[int, tuple[str, ...]] = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""The names of the mesh axes, by their number."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface of ranks on one machine."""

STOP = b""
"""The call that ends a rank process."""

_MESHES: dict[Shape, DeviceMesh] = {}


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, as text: the object itself may not survive the way between processes.

    Args:
        type_name: The exception's class, such as ``"ValueError"``.
        message: ``str(exception)``.
        traceback: The whole remote traceback.
    """

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the text of ``error``, which is being handled."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Result:
    """What a call returned in a rank."""

    value: Any


def mesh(shape: Shape) -> DeviceMesh:
    """Return the device mesh over the first ``prod(shape)`` ranks; for use inside a rank.

    Args:
        shape: Ranks per mesh axis; the axes are named ``("w",)``, ``("h", "w")`` or ``("d", "h", "w")``.

    Returns:
        The same mesh on every call.

    Raises:
        FxShardError: The pool was not started with this shape.
    """
    if shape not in _MESHES:
        msg = (
            f"this rank has no mesh of shape {shape}, only {sorted(_MESHES)}; every rank takes part in building one, "
            f"so name it when the pool starts: RankPool(..., meshes=[{shape}])"
        )
        raise FxShardError(msg)
    return _MESHES[shape]


def encode(value: Any) -> bytes:
    """Return ``value`` as bytes, tensors copied."""
    # multiprocessing's own pickler would share the tensors' memory through file descriptors
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(data: bytes, map_location: str | None = "cpu") -> Any:
    """Return what :func:`encode` was given; only for bytes from our own processes."""
    return torch.load(io.BytesIO(data), map_location=map_location, weights_only=False)


@dataclass(frozen=True)
class Seat:
    """What a rank process is told at its start."""

    rank: int
    world_size: int
    device: str
    meshes: tuple[Shape, ...]
    folder: str


def stack_file(folder: str, rank: int) -> Path:
    """Return the file that ``rank`` dumps its stacks to on SIGUSR1; it exists once the rank listens."""
    return Path(folder) / f"stacks-{rank}.txt"


def serve(seat: Seat, connection: Connection) -> None:
    """Run in the rank process: join the group, then answer calls until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its ranks itself
    torch.set_num_threads(1)
    with stack_file(seat.folder, seat.rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send_bytes(_answer(_join_group, seat))
        while (call := _next_call(connection)) != STOP:
            connection.send_bytes(_answer(_run_call, seat, call))
    if dist.is_initialized():
        dist.destroy_process_group()


def _next_call(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:  # the pool's process is gone
        return STOP


def _answer(step: Callable[..., Any], *args: Any) -> bytes:
    try:
        return encode(Result(step(*args)))
    except (Exception, SystemExit) as error:
        return encode(Failure.of(error))


def _run_call(seat: Seat, call: bytes) -> Any:
    path, body = decode(call)
    sys.path += [entry for entry in path if entry not in sys.path]
    fn, args = decode(body, map_location=None)
    return fn(seat.rank, *args)


def _join_group(seat: Seat) -> None:
    rendezvous = (Path(seat.folder) / "rendezvous").as_uri()  # a file of this pool's own: no port to clash over
    # the pool's deadline ends a hang and can tell where it is; the backend's own would only hide that
    patience = timedelta(hours=1)
    backend = "gloo"
    if seat.device == "cuda":
        take_gpu(seat.rank, seat.world_size)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rendezvous, rank=seat.rank, world_size=seat.world_size, timeout=patience)
    for shape in seat.meshes:
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        _MESHES[shape] = DeviceMesh(seat.device, ranks, mesh_dim_names=MESH_DIM_NAMES[len(shape)])


def take_gpu(rank: int, ranks: int) -> None:
    """Make one GPU of this machine this rank's: that of its number, counted round where there are fewer than ranks.

    NCCL refuses two ranks of one host on one GPU.  Where ranks share GPUs, those on one say that they are of several
    hosts, and talk over sockets: what they compute and keep is what they would on GPUs of their own, how long they take
    is not.

    Args:
        rank: On this machine.
        ranks: How many there are on this machine.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if ranks > gpus:
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}, {rank // gpus}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)

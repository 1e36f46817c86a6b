"""A pool of rank processes on this machine that runs functions as one SPMD program.

Starting ranks costs seconds (import torch, rendezvous, groups), a case costs milliseconds.  The pool starts
them once and feeds them::

    caller                      rank 0        rank 1        rank 2
    run(fn, a, ranks=2)  ---->  fn(0, a)      fn(1, a)      idle
                         <----  [result 0,    result 1]

Ranks depend on each other: one that stops leaves the others in a collective for ever.  So a failure starts a
short grace for the rest, a deadline ends every call, the ranks that do not answer are named with their stacks,
and a pool that may be out of step is started anew by the next call.

Device meshes need every rank of the world to be built, so they are built at the start;
:func:`fxshard.rank_process.mesh` finds them inside a rank.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self

import torch

from fxshard.errors import FxShardError
from fxshard.rank_process import (
    LOOPBACK,
    MESH_DIM_NAMES,
    STOP,
    Failure,
    Seat,
    Shape,
    decode,
    encode,
    mesh,
    serve,
    stack_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import SpawnProcess
    from types import TracebackType

__all__ = ["Failure", "RankPool", "WorkerError", "default_meshes", "mesh"]

_STACK_WAIT_S = 1.0
_LEAST_START_S = 120.0  # on a busy machine importing torch in every rank takes its time
_ENVIRONMENT = threading.Lock()


class WorkerError(FxShardError):
    """Ranks of a :class:`RankPool` raised, ended or did not answer.

    Args:
        message: What the caller reads.
        causes: What each failed rank raised.
        stacks: For each rank that did not answer, the stacks of its threads.
    """

    def __init__(self, message: str, causes: dict[int, Failure], stacks: dict[int, str]) -> None:
        super().__init__(message)
        self.causes = causes
        self.stacks = stacks


def default_meshes(world_size: int) -> tuple[Shape, ...]:
    """Return the mesh shapes that a pool builds when none are named.

    Example:
        >>> default_meshes(4)
        ((1,), (2,), (3,), (4,), (2, 2))
    """
    return (*((n,) for n in range(1, world_size + 1)), *(((2, 2),) if world_size >= 4 else ()))


class RankPool:
    """Rank processes on this machine that stay up between calls.

    Args:
        world_size: How many ranks, >= 1.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (nccl, rank r on GPU r; with fewer GPUs than ranks, ranks share them).
        timeout_s: The longest a call may take, in seconds; a start may take two minutes at least.
        grace_s: How long the other ranks may go on after the first failure, in seconds.
        meshes: Shapes of the device meshes to build; None is :func:`default_meshes`.

    Raises:
        FxShardError: ``world_size``, ``device`` or a mesh shape is out of range, or there is no GPU.

    Example:
        >>> with RankPool(2) as pool:  # doctest: +SKIP
        ...     pool.run(pow, 3)  # rank ** 3
        [0, 1]
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 120,
        grace_s: float = 20,
        meshes: Sequence[Shape] | None = None,
    ) -> None:
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.meshes = default_meshes(world_size) if meshes is None else tuple(meshes)
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        if self.world_size < 1:
            msg = f"world_size must be at least 1, got {self.world_size}"
            raise FxShardError(msg)
        if self.device not in ("cpu", "cuda"):
            msg = f"device must be 'cpu' or 'cuda', got {self.device!r}"
            raise FxShardError(msg)
        if self.device == "cuda" and not torch.cuda.device_count():
            msg = "device='cuda', and torch sees no GPU; device='cpu' runs the ranks on this machine's cores"
            raise FxShardError(msg)
        wrong = [s for s in self.meshes if len(s) not in MESH_DIM_NAMES or not 1 <= math.prod(s) <= self.world_size]
        if wrong:
            msg = f"mesh shapes {wrong} do not fit: 1 to 3 axes over at most world_size={self.world_size} ranks"
            raise FxShardError(msg)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call ``fn(rank, *args)`` in each rank process.

        Args:
            fn: A top-level function, importable in the ranks.
            args: Picklable arguments, the same for every rank.
            ranks: Only the first ``ranks`` processes; the others stay idle.
            timeout_s: The longest this call may take, in seconds; None is the pool's.

        Returns:
            The results in the order of ranks, tensors on the CPU.

        Raises:
            WorkerError: A rank raised, ended or did not answer in time.
            FxShardError: ``fn`` or ``args`` cannot be pickled, or ``ranks`` is out of range.
        """
        count = self.world_size if ranks is None else ranks
        if not 1 <= count <= self.world_size:
            msg = f"ranks must be between 1 and world_size={self.world_size}, got {count}"
            raise FxShardError(msg)
        call = _encode_call(fn, args)
        if not self._processes:
            self._start()
        try:
            for connection in self._connections[:count]:
                connection.send_bytes(call)
            return self._gather(_name(fn), count, self.timeout_s if timeout_s is None else timeout_s)
        except BaseException as error:
            if not (isinstance(error, WorkerError) and _in_step(error, count)):
                self._kill()
            raise

    def close(self) -> None:
        """End the processes; the next :meth:`run` starts new ones."""
        for connection in self._connections:
            try:
                connection.send_bytes(STOP)
            except OSError:  # the process has ended
                continue
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fxshard-ranks-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        with _rank_environment(self.device):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                seat = Seat(rank, self.world_size, self.device, self.meshes, self._folder.name)
                process = context.Process(target=serve, args=(seat, theirs), name=f"fxshard rank {rank}", daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
                self._processes.append(process)
                self._connections.append(ours)
        try:
            self._gather("start", self.world_size, max(self.timeout_s, _LEAST_START_S))
        except BaseException:
            self._kill()
            raise

    def _gather(self, name: str, count: int, timeout_s: float) -> list[Any]:
        answers = self._wait_for_answers(count, timeout_s)
        causes = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, Failure)}
        silent = [rank for rank in range(count) if rank not in answers]
        if causes or silent:
            waited_s = self.grace_s if causes else timeout_s
            raise _worker_error(name, count, causes, self._dump_stacks(silent), waited_s)
        return [answers[rank].value for rank in range(count)]

    def _wait_for_answers(self, count: int, timeout_s: float) -> dict[int, Any]:
        deadline = time.monotonic() + timeout_s
        waiting = dict(enumerate(self._connections[:count]))
        answers: dict[int, Any] = {}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), left_s)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                answers[rank] = self._receive(rank, waiting.pop(rank))
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        return answers

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            return decode(connection.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            return Failure("ProcessEnded", f"the process ended with exit code {code}", "")

    def _dump_stacks(self, silent: Sequence[int]) -> dict[int, str]:
        if not silent or self._folder is None:
            return {}
        files = {rank: stack_file(self._folder.name, rank) for rank in silent}
        for rank in silent:
            pid = self._processes[rank].pid
            if pid is not None and files[rank].exists():  # the file exists once the rank listens to the signal
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACK_WAIT_S)
        return {rank: file.read_text() if file.exists() else "(not started yet)" for rank, file in files.items()}

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _in_step(error: WorkerError, count: int) -> bool:
    """Whether every rank raised the same kind of error, so that no collective is left half done."""
    kinds = {cause.type_name for cause in error.causes.values()}
    return len(error.causes) == count and len(kinds) == 1 and "ProcessEnded" not in kinds


def _worker_error(
    name: str, count: int, causes: dict[int, Failure], stacks: dict[int, str], waited_s: float
) -> WorkerError:
    lines = []
    if causes:
        lines.append(f"{len(causes)} of {count} ranks failed in {name!r}:")
        lines += [f"  rank {rank}: {cause.type_name}: {cause.message}" for rank, cause in causes.items()]
    if stacks:
        after = "after the first failure" if causes else "; raise timeout_s if it only needs longer"
        names = ", ".join(map(str, stacks))
        lines.append(f"ranks [{names}] of {count} did not answer in {name!r} within {waited_s:g} s {after}".rstrip())
    for rank, cause in causes.items():
        lines.append(f"--- traceback of rank {rank}\n{cause.traceback.rstrip()}")
    lines += [f"--- stacks of rank {rank}, which did not answer\n{stack.rstrip()}" for rank, stack in stacks.items()]
    return WorkerError("\n".join(lines), causes, stacks)


@contextmanager
def _rank_environment(device: str) -> Iterator[None]:
    """Set what a rank must find in its environment before it imports torch."""
    # else gloo asks for the host's name, which may not resolve
    wanted = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    if device == "cpu":
        wanted["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else every rank starts a compile pool of its own
    with _ENVIRONMENT:  # pools may be started by several threads
        before = {key: os.environ.get(key) for key in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            _restore(before)


def _restore(before: dict[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _encode_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        call = encode((fn, args))
    except Exception as error:
        msg = f"{_name(fn)!r} or its arguments cannot be sent to the ranks ({error}); give a top-level function"
        raise FxShardError(msg) from error
    # the path goes first: the function may live in a module found since the ranks started
    return encode((list(sys.path), call))

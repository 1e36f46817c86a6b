"""Ranks compare what they are about to run before they run it.

Every rank posts a small description to the store that started the process group and reads the others'.
No collective is used: ranks that disagree must end in an error, not in a collective that waits.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx

from fxshard._torch import FakeTensor, WeakTensorKeyDictionary, _get_default_store
from fxshard.errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")
TIMEOUT_S = 25.0
"""How long ranks wait for one another, and twice the time that this rank needed: a loaded machine is slow for all."""
FAILED = "failed"
_rounds: dict[tuple[int, ...], int] = {}
_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def digest(parts: Iterable[object]) -> str:
    """Return a short hash of the parts' text."""
    joined = "\n".join(map(str, parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers: equal tensors have equal sums on one kind of device."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
    return int(words.sum(dtype=torch.int64))


def values_digest(tensors: Sequence[object]) -> str:
    """Return a hash of the values of the real tensors among ``tensors``."""
    return digest(
        checksum(t) for t in tensors if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) and t.numel()
    )


def first_time(tensors: Sequence[object]) -> bool:
    """Return whether one of these tensors was not asked about before.

    Values are compared once: later, kernels that add in no fixed order may have moved ranks apart by rounding.
    """
    real = [t for t in tensors if isinstance(t, torch.Tensor)]
    first = not real or any(t not in _seen for t in real)
    for tensor in real:
        _seen[tensor] = True
    return first


def graph_digest(graph: fx.GraphModule) -> str:
    """Return a hash of a graph's nodes and nested graphs, without the numbers of devices: each rank has its own."""
    nodes = (n for m in graph.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
    return digest(
        (n.op, n.name, getattr(n.target, "__name__", n.target), _unnumbered(n.args), _unnumbered(n.kwargs))
        for n in nodes
    )


def _unnumbered(arguments: Any) -> Any:
    return fx.node.map_aggregate(arguments, lambda a: a.type if isinstance(a, torch.device) else a)


def collectives_digest(local: fx.GraphModule) -> str:
    """Return a hash of a local graph's collectives, in order, without what differs from rank to rank."""
    sequence = []
    for node in local.graph.nodes:
        # a collective's last argument is its group
        if getattr(node.target, "namespace", "") == "fxshard" and isinstance(node.args[-1], str):
            geometry = [a for a in node.args[1:-1] if isinstance(a, (list, str, float))]
            sequence.append((str(node.target), geometry))
    return digest(sequence)


def agree(mesh: DeviceMesh, description: dict[str, str], spent_s: float = 0.0) -> None:
    """Compare ``description`` on all ranks of ``mesh``.

    Args:
        mesh: The spatial mesh.
        description: What has to be equal: a name and a value for each thing.  A rank that failed before
            posts its message under ``"failed"``.
        spent_s: Seconds that this rank needed to get here since it began to compile.

    Raises:
        RankMismatchError: A rank differs, failed, or did not come.
    """
    _raise_on_difference(exchange(mesh, description, TIMEOUT_S + 2 * spent_s))


def exchange(mesh: DeviceMesh, said: dict[str, str], timeout_s: float = TIMEOUT_S) -> list[dict[str, str]]:
    """Return what each rank of ``mesh`` says, in the mesh's order.

    Args:
        mesh: The spatial mesh.
        said: What this rank says.
        timeout_s: How long to wait for a rank, in seconds.

    Raises:
        RankMismatchError: A rank did not come.
    """
    prefix = _post(mesh, said)
    store, answers = _get_default_store(), []
    for other in range(len(_ranks(mesh))):
        try:
            store.wait([f"{prefix}/{other}"], timedelta(seconds=timeout_s))
        except Exception as error:
            raise RankMismatchError(_absent(other, timeout_s)) from error
        answers.append(json.loads(store.get(f"{prefix}/{other}")))
    return answers


def announce_failure(mesh: DeviceMesh | None, message: str) -> None:
    """Tell ranks that wait for this one to compile that it failed before it came so far.

    This takes the place of the comparison that they wait for: the next one is another.

    Args:
        mesh: The spatial mesh; None for all ranks of the default process group.
        message: What they report.
    """
    if not dist.is_initialized():
        return
    try:
        _post(mesh, {FAILED: message})
    except RuntimeError as error:  # the store went with the rank that holds it; the caller raises what happened first
        log.warning("the other ranks could not be told of %r: %s", message, error)


def _ranks(mesh: DeviceMesh | None) -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()) if mesh is None else (int(r) for r in mesh.mesh.flatten()))


def _post(mesh: DeviceMesh | None, description: dict[str, str]) -> str:
    """Post a description for this comparison and go on to the next; return its key without the rank."""
    ranks = _ranks(mesh)
    prefix = f"fxshard/{'-'.join(map(str, ranks))}/{_rounds.get(ranks, 0)}"
    me = ranks.index(dist.get_rank() if mesh is None else mesh.get_rank())
    _get_default_store().set(f"{prefix}/{me}", json.dumps(description))
    _rounds[ranks] = _rounds.get(ranks, 0) + 1
    return prefix


def _absent(rank: int, timeout_s: float) -> str:
    return (
        f"rank {rank} of the mesh did not compile this graph within {timeout_s:.0f} s: it raised before, or it was "
        "given another input shape, mode (train/eval) or model; every rank of a spatial mesh runs the same program"
    )


def check_failures(said: Sequence[dict[str, Any]]) -> None:
    """Raise what other ranks posted in place of an answer.

    Raises:
        RankMismatchError: Some failed.
    """
    failed = {r: d[FAILED] for r, d in enumerate(said) if FAILED in d}
    if failed:
        details = "; ".join(f"rank {r}: {text}" for r, text in failed.items())
        msg = f"compilation failed on {len(failed)} of {len(said)} ranks: {details}"
        raise RankMismatchError(msg)


def _raise_on_difference(said: Sequence[dict[str, Any]]) -> None:
    if all(FAILED in d for d in said):
        return  # each rank raises its own error
    check_failures(said)
    lines = []
    for name in said[0]:
        values = [d.get(name) for d in said]
        if any(v != values[0] for v in values):
            lines.append(f"  {name}: " + ", ".join(f"rank {r} has {v}" for r, v in enumerate(values)))
    if lines:
        remedy = "give every rank of the spatial mesh the same model, parameters, seed, batch and options"
        raise RankMismatchError("the ranks disagree:\n" + "\n".join(lines) + f"\n{remedy}")

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
NOT_COMPILED = (
    "did not compile this graph within {} s: it raised before, or it was given another input shape, mode (train/eval) "
    "or model; every rank of a spatial mesh runs the same program"
)
FAILED = "failed"
WORDS_AT_A_TIME = 2**20
MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)
"""SplitMix64's increment and first multiplier, as signed integers."""
DIMENSIONS = ("dim", "from_dim", "to_dim")
"""How the schemas of collectives name dimensions."""
_rounds: dict[tuple[int, ...], int] = {}
_posted: dict[tuple[int, ...], list[str]] = {}
"""The keys of this rank's words that may still be in the store, by the ranks of the mesh."""
_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def digest(parts: Iterable[object]) -> str:
    """Return a short hash of the parts' text."""
    joined = "\n".join(map(str, parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def checksum(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits in their order; equal tensors have equal hashes on one kind of device.

    The bits are read as integers and summed with a weight for each place, modulo 2^64, some at a time.

    Args:
        tensor: On any device; not more than a copy of it and a few megabytes are allocated there.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
    weights = _weights(min(words.numel(), WORDS_AT_A_TIME), words.device)
    sums = [(part.long() * weights[: part.numel()]).sum() for part in words.split(WORDS_AT_A_TIME)]
    return digest(torch.stack(sums).tolist())


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return well mixed integers of 64 bits: with regular ones, a block moved by a round number may not be seen."""
    mixed = torch.arange(1, count + 1, device=device) * MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 31)) * MULTIPLIERS[1]
    return mixed ^ (mixed >> 29)


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
    return digest(
        (str(node.target), _geometry(node))
        for node in local.graph.nodes
        # a collective's last argument is its group
        if getattr(node.target, "namespace", "") == "fxshard" and isinstance(node.args[-1], str)
    )


def _geometry(collective: fx.Node) -> list[object]:
    """Return the arguments that are the same on every rank: not its place, nor how many positions it holds."""
    assert isinstance(collective.target, torch._ops.OpOverload)
    named = zip(collective.target._schema.arguments, collective.args[:-1], strict=False)
    return [a for schema, a in named if isinstance(a, (list, str, float)) or schema.name in DIMENSIONS]


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


def exchange(
    mesh: DeviceMesh, said: dict[str, str], timeout_s: float | None = None, absent: str = NOT_COMPILED
) -> list[dict[str, str]]:
    """Return what each rank of ``mesh`` says, in the mesh's order.

    The store keeps the last two things that a rank said: whoever says the next has read those before it.

    Args:
        mesh: The spatial mesh.
        said: What this rank says.
        timeout_s: How long to wait for the ranks, in seconds; None is ``TIMEOUT_S``.
        absent: What is said of a rank that does not come: what it did not do, with ``{}`` for the seconds.

    Raises:
        RankMismatchError: A rank did not come.
    """
    ranks, prefix = _ranks(mesh), _post(mesh, said)
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    store, keys = _get_default_store(), [f"{prefix}/{place}" for place in range(len(ranks))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except Exception as error:
        silent = [place for place, key in enumerate(keys) if not _is_there(key)]
        if silent:  # else the last one came meanwhile
            who = "ranks" if len(silent) > 1 else "rank"
            msg = f"{who} {', '.join(map(str, silent))} of the mesh {absent.format(f'{timeout_s:.0f}')}"
            raise RankMismatchError(msg) from error
    answers = [json.loads(answer) for answer in store.multi_get(keys)]
    *read, _ = _posted[ranks]
    for key in read:
        store.delete_key(key)
    del _posted[ranks][:-1]
    return answers


def _is_there(key: str) -> bool:
    try:
        return bool(_get_default_store().check([key]))
    except RuntimeError:  # the store went with the rank that holds it
        return False


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
    _posted.setdefault(ranks, []).append(f"{prefix}/{me}")
    _rounds[ranks] = _rounds.get(ranks, 0) + 1
    return prefix


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

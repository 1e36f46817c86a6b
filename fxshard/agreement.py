"""Ranks compare what they are about to run before they run it.

Every rank says in a few words what it is about to compile, at a compilation, and what it is about to run, at each call
(:mod:`fxshard.meeting`).  Ranks that disagree end in an error on each of them, not in a collective that waits.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fxshard._torch import default_group_timeout
from fxshard.errors import RankMismatchError
from fxshard.meeting import GRACE_S, Meeting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")
TIMEOUT_S = 20.0
"""How long ranks wait for one another, and twice the time that this rank needed: a loaded machine is slow for all."""
NOT_COMPILED = (
    "did not compile this graph within {} s: it raised before, or it was given another input shape, mode (train/eval) "
    "or model; every rank of a spatial mesh runs the same program"
)
DEFAULT_PATIENCE_S = 1800.0
"""Where the default process group has no timeout of its own."""
NOT_CALLED = (
    "did not call the model within {} s; at every call the ranks compare what they run: it raised before, ran out of "
    "batches, or does work of its own between two steps: end such work with torch.distributed.barrier()"
)
FAILED, LEFT, WORK = "failed", "left", "work"
"""Names of what ranks say: why one cannot go on, that it no longer waits, and what it is about to do."""
_TOLD = "_fxshard_told"
"""An attribute of errors that the other ranks know of."""
FOLLOWS = (
    (
        ("option ", "input shapes", "input types", "need a gradient"),
        ("captured graph", "memory formats", "input values", "sequence of collectives"),
    ),
    (
        ("captured graph",),
        ("parameter and buffer values", "memory formats", "sequence of collectives", "generator state"),
    ),
)
"""Beginnings of the names of what is compared, and what differs because that does."""
_SAME_BATCH = (
    "ranks that share an image need the same batch: seed the loader alike, and number a DistributedSampler by the data "
    'axis alone; or pass each rank its part, with inputs="local"'
)
REMEDIES = {
    ("option ",): "give every rank the same options",
    ("input ",): _SAME_BATCH,
    ("need a gradient",): "one mode (no_grad, train or eval) and the same frozen layers on every rank",
    ("captured graph",): "every rank runs the same code of the model: one mode (train or eval), the same keywords",
    (
        "parameter and buffer values",
    ): "torch.manual_seed(...) before the model is made, or load_state_dict, on each rank",
    ("memory formats",): "model.to(memory_format=...) on every rank or on none",
    ("generator state",): "torch.manual_seed(...) on every rank, and no draws of the default generator on some of them",
    ("which parameters",): "call models, and their pieces, in one order on every rank, and replace parameters on all",
    ("check_every",): "pass inputs of one memory format on every rank",
    ("torch",): "install one version of torch on every rank",
}
"""What to do, by the beginnings of the names of what differs."""


def agree(mesh: DeviceMesh, words: dict[str, str], spent_s: float = 0.0) -> int:
    """Compare on all ranks of ``mesh`` what each is about to compile.

    Args:
        mesh: The spatial mesh.
        words: What has to be equal: a name and a value for each thing.
        spent_s: Seconds that this rank needed to get here since it began to compile.

    Returns:
        A number of this comparison: the same on all ranks, and another each time.

    Raises:
        RankMismatchError: A rank differs, failed, or did not come.
    """
    meeting = Meeting(mesh, words)
    check_same(_said(meeting, TIMEOUT_S + 2 * spent_s, NOT_COMPILED))
    return meeting.number


def agree_that_all_compiled(mesh: DeviceMesh) -> None:
    """Wait until all ranks of ``mesh`` have compiled what they agreed on.

    A rank whose inner compiler failed has to compile again, and the others with it.

    Raises:
        RankMismatchError: A rank failed, or did not come.
    """
    check_same(_said(Meeting(mesh, {WORK: "a graph that was compiled"}), patience_s(), NOT_CALLED))


def agree_to_run(mesh: DeviceMesh, words: dict[str, str], values: dict[str, str]) -> tuple[int, str]:
    """Compare on all ranks of ``mesh`` what each is about to run.

    Args:
        mesh: The spatial mesh.
        words: As for :func:`agree`, where another rank may be.
        values: What may differ, by rounding.

    Returns:
        A number of this comparison, as :func:`agree`'s; and which of the values differ, and what to do, nothing where
        none does.

    Raises:
        RankMismatchError: A rank differs, failed, or did not come.
    """
    meeting = Meeting(mesh, {**words, **values})
    said = _said(meeting, patience_s(), NOT_CALLED, values)
    check_same(_without(said, values))
    return meeting.number, _disagreement([{name: each[name] for name in values if name in each} for each in said])


def exchange(mesh: DeviceMesh, words: dict[str, str]) -> list[dict[str, str]]:
    """Return what each rank of ``mesh`` says at a call, in the mesh's order.

    Args:
        mesh: The spatial mesh.
        words: What this rank says; every rank says something under the same names.

    Raises:
        RankMismatchError: A rank came with something else, failed, or did not come.
    """
    meeting = Meeting(mesh, {WORK: f"{', '.join(words)} to tell"})
    check_same(_said(meeting, patience_s(), NOT_CALLED))
    told = meeting.told(words, TIMEOUT_S)
    silent = [place for place, answer in enumerate(told) if not answer]
    if silent:
        msg = f"ranks {silent} of the mesh came, and ended before they told their {', '.join(words)}"
        raise RankMismatchError(msg)
    return told


def patience_s() -> float:
    """Return how long ranks wait for one another at a call, in seconds: as long as in a collective."""
    timeout = default_group_timeout()
    return DEFAULT_PATIENCE_S if timeout is None else timeout.total_seconds()


def announce_failure(mesh: DeviceMesh | None, message: str, error: BaseException) -> None:
    """Tell ranks that wait for this one, to compile or to run, that it failed before it came so far.

    This takes the place of the comparison that they wait for: the next one is another.  So an error is told once,
    whoever sees it on its way.

    Args:
        mesh: The spatial mesh; None for all ranks of the default process group.
        message: What they report.
        error: What happened.
    """
    if not dist.is_initialized() or getattr(error, _TOLD, False):
        return
    if mesh is not None and mesh.get_coordinate() is None:  # nobody waits for a rank that is not in it
        return
    setattr(error, _TOLD, True)
    try:
        meeting = Meeting(mesh, {FAILED: message})
        meeting.leave(meeting.words)
    except RuntimeError as lost:  # the store went with the rank that holds it; the caller raises what happened first
        log.warning("the other ranks could not be told of %r: %s", message, lost)


def forget_told(error: BaseException | None) -> None:
    """Forget that the other ranks know of an error, as it leaves fxshard: one object may be raised twice."""
    if hasattr(error, _TOLD):
        delattr(error, _TOLD)


def failures_of_others(mesh: DeviceMesh, message: str) -> str:
    """Tell the other ranks of a failure in a collective, and return what they tell of theirs.

    A rank that got through the collective, and comes to the next comparison later, finds the failure there.

    Args:
        mesh: The spatial mesh.
        message: What happened here.
    """
    meeting = Meeting(mesh, {FAILED: message})
    try:
        meeting.leave(meeting.words)
        said = meeting.told(meeting.words, GRACE_S)
    except RuntimeError as error:
        return f"the rank that keeps the store of the process group ended: {error}"
    own = mesh.mesh.flatten().tolist().index(dist.get_rank())
    told = [f"rank {r}: {words.get(FAILED, 'nothing')}" for r, words in enumerate(said) if r != own]
    return "; ".join(told)


def _said(meeting: Meeting, timeout_s: float, absent: str, values: Collection[str] = ()) -> list[dict[str, str]]:
    """Return the words of the ranks that came, in the mesh's order; none where all came with the same.

    Args:
        meeting: Of the ranks.
        timeout_s: How long to wait for them, in seconds.
        absent: What is said of one that did not come.
        values: The names of what may differ: where nothing else does, the ranks go on, and so wait for all.

    Raises:
        RankMismatchError: A rank did not come in time, and those that did agree.
    """
    if dist.get_backend() == "fake":  # nobody else is there
        return []
    absent = absent.format(f"{timeout_s:.0f}")
    try:
        said = meeting.differing(timeout_s)
        if said and any(w not in ({}, meeting.words) for w in said) and not _ends_in_error(said, values):
            said = meeting.told(meeting.words, timeout_s)
    except RuntimeError as error:
        msg = f"the rank that keeps the store of the process group ended, or {absent}"
        raise RankMismatchError(msg) from error
    if said is None:
        return []
    silent = [str(place) for place, words in enumerate(said) if not words]
    if _ends_in_error(said, values):
        return said
    if silent:
        with suppress(RuntimeError):  # the store may be what went
            meeting.leave({**meeting.words, LEFT: "before all came"})
        msg = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)} of the mesh {absent}"
        raise RankMismatchError(msg)
    if any(LEFT in words for words in said) or said.count(meeting.words) == len(said):
        msg = f"the other ranks gave up waiting for this one before it came: it {absent}"
        raise RankMismatchError(msg)
    return said


def _ends_in_error(said: Sequence[dict[str, str]], values: Collection[str]) -> bool:
    """Return whether what some ranks said lets none of them go on, whatever the others say."""
    return any(FAILED in words for words in said) or bool(_disagreement(_without(said, {*values, LEFT})))


def _without(said: Sequence[dict[str, str]], names: Collection[str]) -> list[dict[str, str]]:
    return [{name: word for name, word in words.items() if name not in names} for words in said]


def check_failures(said: Sequence[dict[str, Any]]) -> None:
    """Raise what other ranks posted in place of an answer.

    Raises:
        RankMismatchError: Some failed.
    """
    failed = {r: d[FAILED] for r, d in enumerate(said) if FAILED in d}
    if failed:
        details = "; ".join(f"rank {r}: {text}" for r, text in failed.items())
        msg = f"{len(failed)} of {len(said)} ranks failed: {details}"
        raise RankMismatchError(msg)


def check_same(said: Sequence[dict[str, str]]) -> None:
    """Compare what ranks say under the same names.

    Args:
        said: Each rank's words, empty of one that did not come.

    Raises:
        RankMismatchError: Some failed, or differ.
    """
    check_failures(said)
    text = _disagreement(said)
    if text:
        msg = f"the ranks disagree:\n{text}"
        raise RankMismatchError(msg)


def _disagreement(said: Sequence[dict[str, str]]) -> str:
    """Return a line for each thing that differs first, and one with what to do; nothing where nothing does."""
    names = dict.fromkeys(name for words in said for name in words)
    held = {name: {rank: words[name] for rank, words in enumerate(said) if name in words} for name in names}
    causes = _causes([name for name in names if len(set(held[name].values())) > 1])
    lines = [f"  {name}: {_who_has_what(held[name])}" for name in causes]
    return "\n".join([*lines, *["; ".join(dict.fromkeys(map(_remedy, causes)))] * bool(causes)])


def _who_has_what(held: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in held.items())


def _causes(differing: Sequence[str]) -> list[str]:
    """Return what differs, without what does because of the rest."""
    following = {name for causes, names in FOLLOWS if any(d.startswith(causes) for d in differing) for name in names}
    return [name for name in differing if name not in following]


def _remedy(name: str) -> str:
    found = (remedy for beginnings, remedy in REMEDIES.items() if name.startswith(beginnings))
    return next(found, "give every rank of the spatial mesh the same model, parameters, seed, batch and options")

"""Counts what a rank hands to gloo, below everything that fxshard has: in the operators that call a group's backend.

A functional collective, eager or compiled, ends in an operator of the namespace ``c10d``, and that in a call of gloo's
backend, which leaves a record of its own::

    _c10d_functional::all_to_all_single(tensor, ..., group's name)
        c10d::alltoall_base_(output, tensor, group, output sizes, sizes)
            gloo:all_to_all(tensor)

torch's execution trace observer writes all three down while a step runs, with shapes, types and numbers; nothing that
runs is changed.  Which of them is within which it does not know where a collective is not waited for at once: they are
paired by their order.  (A replaced kernel, in Python, deadlocks: gloo's thread frees tensors under a lock for which the
caller waits with the interpreter.)
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from fxshard.ops import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class HandedOver:
    """What a rank has handed over, by kind of collective.

    A sum counts as one message of its payload, a gather as one to each other rank, and a swap (``all_to_all``) as one
    to each other rank that gets something.
    """

    def __init__(self) -> None:
        self.sent: dict[str, Traffic] = {}
        self.calls = 0

    def read(self, trace: list[dict[str, Any]]) -> None:
        """Count the nodes of a trace.

        Raises:
            KeyError: A collective is none of those that a plan knows.
            AssertionError: Gloo got it otherwise than it was asked for.
        """
        nodes = sorted(trace, key=lambda node: int(node["id"]))  # as they began
        asked, handed, received = (_begins(nodes, space) for space in ("_c10d_functional::", "c10d::", "gloo:"))
        asked = [node for node in asked if not node["name"].endswith("::wait_tensor")]
        payloads = Counter[tuple[str, int]]()
        for functional, node in zip(asked, handed, strict=True):
            asked_for, kind, measure = MEASURES[node["name"]]
            assert functional["name"].startswith(asked_for)  # Inductor's all_reduce_ works in place
            sent, payload = measure(_values(node), _resolve_process_group(_group(functional)).rank())
            self.sent[kind] = self.sent.get(kind, Traffic()) + sent
            payloads[kind, payload] += 1
        self.calls += payloads.total()
        payloads.subtract((BACKEND[node["name"]], sum(map(_bytes, _values(node)))) for node in received)
        assert not any(payloads.values()), f"gloo got something else: {payloads}"


def _begins(nodes: list[dict[str, Any]], space: str) -> list[dict[str, Any]]:
    return [node for node in nodes if node["name"].startswith(space)]


def _values(node: dict[str, Any]) -> list[Any]:
    values: list[Any] = node["inputs"]["values"]
    return values


def _group(functional: dict[str, Any]) -> GroupName:
    """Return the name of the group of a functional collective: its last text."""
    texts = [v for v, kind in zip(_values(functional), functional["inputs"]["types"], strict=True) if kind == "String"]
    return GroupName(texts[-1])


def _bytes(tensor: list[Any]) -> int:
    """Return the bytes of a tensor: its id, its storage's, the offset, elements, bytes of each, device."""
    _, _, _, elements, itemsize, _ = tensor
    return int(elements * itemsize)


def _sum(values: list[Any], _: int) -> tuple[Traffic, int]:
    payload = sum(map(_bytes, values[0]))
    return Traffic(1, payload), payload


def _gather(values: list[Any], _: int) -> tuple[Traffic, int]:
    (output,), (part,) = values[:2]
    others = _bytes(output) // _bytes(part) - 1
    return Traffic(others, others * _bytes(part)), _bytes(part)


def _gather_base(values: list[Any], rank: int) -> tuple[Traffic, int]:
    output, part, *_ = values
    return _gather([[output], [part]], rank)


def _swap(values: list[Any], rank: int) -> tuple[Traffic, int]:
    _, tensor, _, _, sizes, *_ = values
    sent = [_bytes(tensor) * size // sum(sizes) for to, size in enumerate(sizes) if to != rank and size]
    return Traffic(len(sent), sum(sent)), _bytes(tensor)


MEASURES: dict[str, tuple[str, str, Callable[[list[Any], int], tuple[Traffic, int]]]] = {
    "c10d::allreduce_": ("_c10d_functional::all_reduce", "sum", _sum),
    "c10d::_allgather_base_": ("_c10d_functional::all_gather_into_tensor", "gather", _gather_base),
    "c10d::allgather_into_tensor_coalesced_": ("_c10d_functional::all_gather_into_tensor", "gather", _gather),
    "c10d::alltoall_base_": ("_c10d_functional::all_to_all_single", "swap", _swap),
}
"""By operator of ``c10d``: what is called for it; the kind of collective; what is sent, and the bytes of the tensor."""
BACKEND = {"gloo:all_reduce": "sum", "gloo:all_gather": "gather", "gloo:all_to_all": "swap"}
"""The kind of each of gloo's records."""


@contextmanager
def handed_over() -> Iterator[HandedOver]:
    """Count what this rank hands over; the count is there when the context is left."""
    found = HandedOver()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        try:
            yield found
        finally:
            observer.stop()
            observer.unregister_callback()
        found.read(json.loads(path.read_text())["nodes"])

"""The small models of ``tests/cases.json``: what people who do this job write, and what right looks like."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from fxshard.compare import Case
from fxshard.workers import WorkerError
from tests.ranks.checks import assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fxshard.workers import RankPool

CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "cases.json").read_text())}
REFUSED = {
    "data-dependent-branch-refusal": "line 7, in forward",
}
"""Cases that may be refused, and what the message has to name."""
COMPILED_REFERENCE = {"checkpoint-bn-dropout"}
ELSEWHERE = {"autocast-bf16-bn"}  # exact only within bfloat16: test_autocast.py


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Run the case's sketch and return its model and inputs."""
    scope: dict[str, Any] = {}
    exec(CASES[name]["minimal_model_sketch"], scope)
    return scope["model"], scope["inputs"]


def parameters() -> list[Any]:
    """Return (name, dims, mesh) for each case: one for every change, all shard dimensions and meshes nightly."""
    found = []
    for name in CASES.keys() - ELSEWHERE:
        runs = list(configurations(CASES[name]))
        for dims, mesh in runs:
            marks = () if (dims, mesh) == runs[0] else pytest.mark.nightly
            found.append(pytest.param(name, dims, mesh, marks=marks, id=f"{name}-{dims}-{mesh}"))
    return sorted(found, key=lambda parameter: str(parameter.id))


def configurations(case: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (dims, mesh): each shard dimension on three and on two ranks, two dimensions on a 2 x 2 mesh."""
    for dims in case["shard_dims"]:
        first = dims["inputs"][0] if isinstance(dims, dict) else dims
        if isinstance(first, list):
            yield tuple(first), (2, 2)
        else:
            yield (first,), (3,)
            yield (first,), (2,)
    if case["shard_dims"][:2] in ([2, 3], [3, 2]):
        yield (2, 3), (2, 2)


@pytest.mark.parametrize(("name", "dims", "mesh"), parameters())
def test_case_equals_one_device(pool: RankPool, name: str, dims: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    placements = tuple(Shard(d) if d >= 0 else Replicate() for d in dims)
    reference = "aot_eager" if name in COMPILED_REFERENCE else None
    training = build(name)[0].training
    case = Case(functools.partial(build, name), placements, mesh, training=training, reference_backend=reference)
    if name not in REFUSED:
        assert_exact(pool, case, gathers=None)  # but the work is split, in every one of them
        return
    with pytest.raises(WorkerError, match=re.escape(REFUSED[name])) as refusal:
        pool.run(judge, [case], ranks=math.prod(mesh))
    assert {cause.type_name for cause in refusal.value.causes.values()} == {"CaptureError"}

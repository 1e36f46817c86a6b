"""Logs and traces as torch's own: ``TORCH_LOGS`` sets fxshard's level, ``TORCH_TRACE`` has the plan of each graph."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard
from fxshard import artifacts
from tests.rank_graphs import graphs

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["fxshard_plan_summary", "fxshard_plan", "fxshard_local_graph"]


def compile_one() -> None:
    """Compile one graph, as the first of two ranks of which there is no other (in a process of its own)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    net = fxshard.transform(nn.Conv2d(3, 4, 3, padding=1), mesh=mesh, placements=[Shard(3)], inner_backend="eager")
    net(torch.zeros(1, 3, 8, 16)).sum().backward()


def said(**environment: str) -> str:
    """Return what a process writes to the standard error that compiles one graph."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    environ |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", f"from {__name__} import compile_one; compile_one()"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stderr


def payloads(trace: str) -> dict[str, list[str]]:
    """Return the artifacts of a trace: after each line of metadata the payload is indented by a tab."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in trace.splitlines():
        if line.startswith("\t"):
            found.setdefault(name, []).append(line[1:])
        else:
            about: dict[str, Any] = json.loads(line.partition("] ")[2])
            name = about.get("artifact", {}).get("name", "")
    return found


def test_a_trace_has_the_plan_and_the_program(tmp_path: Path) -> None:
    log = said(TORCH_TRACE=str(tmp_path), TORCH_LOGS="+fxshard")
    assert lines(log) == {"artifacts", "compilations"}
    (trace,) = tmp_path.glob("*rank_0*.log")
    found = payloads(trace.read_text())
    assert [name for name in found if name.startswith("fxshard")] == NAMES
    summary, plan, program = ("\n".join(found[name]) for name in NAMES)
    assert summary.startswith("2 ranks, mesh 2; what rank (0,) holds and sends in a step")
    assert [n["op"] for n in json.loads(plan)["nodes"]][-2:] == ["aten.conv2d.default", "output"]
    assert "the parameter or buffer weight" in program
    assert "torch.ops.fxshard.all_gather.default" in program


def lines(log: str) -> set[str]:
    """Return which modules of fxshard wrote to a log."""
    return set(re.findall(r" fxshard/(\w+)\.py:\d+\] ", log))


def test_torch_logs_sets_the_level() -> None:
    assert lines(said(TORCH_LOGS="fxshard")) == {"compilations"}
    assert lines(said(TORCH_LOGS="-fxshard")) == set()


def test_an_artifact_that_cannot_be_written_is_no_reason_not_to_train(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(name: str, *_: object) -> None:
        message = f"no space for {name}"
        raise OSError(message)

    monkeypatch.setattr(artifacts, "trace_artifact", fails)
    made = graphs(nn.Conv2d(3, 4, 3, padding=1), [torch.zeros(1, 3, 8, 16)])
    with caplog.at_level(logging.WARNING, logger="fxshard"):
        artifacts.leave(made.planned, made.local, made.config)
    assert [record.args for record in caplog.records] == [(f"the artifact {n} of torch's trace",) for n in NAMES]
    assert "no space for fxshard_plan" in caplog.text


def test_a_plan_that_cannot_be_described_is_no_reason_not_to_train(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        message = "a bug of the description"
        raise KeyError(message)

    made = graphs(nn.Conv2d(3, 4, 3, padding=1), [torch.zeros(1, 3, 8, 16)])
    monkeypatch.setattr(artifacts, "describe", fails)
    with caplog.at_level(logging.DEBUG, logger="fxshard"):
        artifacts.leave(made.planned, made.local, made.config)
    assert "the plan's summary could not be written" in caplog.text
    assert "a bug of the description" in caplog.text

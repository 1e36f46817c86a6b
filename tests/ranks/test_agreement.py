"""Ranks that disagree get a clear error, every one of them and soon; none waits in a collective.

Each rank catches what it gets and reports it, so the pool stays in step.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fxshard import agreement, backend, meeting
from fxshard.api import transform
from fxshard.compare import Case, Difference, compare_models
from fxshard.errors import FxShardError, PlanError
from fxshard.meeting import GRACE_S
from fxshard.workers import mesh
from tests.ranks.training import logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

RANKS = 2
LIMIT_S = 30.0
SCRIPT = Path(__file__).parent / "fresh_interpreter.py"


class Net(nn.Module):
    """A convolution and, on request, drop-out."""

    def __init__(self, kernel: int = 3, rate: float = 0.0) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, kernel, padding=kernel // 2), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.conv(x))
        return y


class Branch(nn.Module):
    """Code that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.mean() > 0:  # the line
            y = y * 2
        z: Tensor = self.second(y)
        return z


@dataclass(frozen=True)
class Program:
    """What one rank runs.

    Args:
        seed: Of the weights.
        batch_seed: Of the image.
        drawn_seed: Set before the call.
        width: Of the image.
        kernel: Of the convolution.
        rate: Of the drop-out.
        options: Options of the transform.
        evaluate: Whether the model is in eval mode.
        flipped: Whether the images of the batch come in the other order.
        channels_last: Whether the weights lie in memory with the channels last.
    """

    seed: int = 0
    batch_seed: int = 0
    drawn_seed: int = 0
    width: int = 16
    kernel: int = 3
    rate: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    evaluate: bool = False
    flipped: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank got: an error, or none.

    Args:
        kind: The error's class; empty for none.
        text: Its message.
        is_ours: Whether it is an FxShardError.
        seconds: How long it took.
    """

    kind: str
    text: str
    is_ours: bool
    seconds: float


def through_transform(model: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    return transform(model, **options)


def through_compile(model: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend="fxshard", options=options, fullgraph=True)
    return compiled


WAYS = {"transform": through_transform, "compile": through_compile}


def outcome(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Outcome(type(error).__name__, str(error), isinstance(error, FxShardError), time.monotonic() - start)
    return Outcome("", "", False, time.monotonic() - start)


def run_program(rank: int, way: str, programs: list[Program]) -> Outcome:
    """Run this rank's program once (in a rank process)."""
    program = programs[rank]
    torch.compiler.reset()
    torch.manual_seed(program.seed)
    model = Net(program.kernel, program.rate).double().train(not program.evaluate)
    if program.channels_last:
        model = model.to(memory_format=torch.channels_last)
    torch.manual_seed(program.batch_seed)
    image = torch.randn(2, 3, 8, program.width, dtype=torch.float64)
    image = image.flip(0) if program.flipped else image
    options = {"mesh": mesh((RANKS,)), "placements": [Shard(3)], "inner_backend": "eager", **dict(program.options)}
    net = WAYS[way](model, options)
    torch.manual_seed(program.drawn_seed)
    return outcome(lambda: net(image))


# id: what rank 0 and rank 1 run, the line that says what differs, and the remedy
DISAGREEMENTS: dict[str, tuple[Program, Program, str, str]] = {
    "weights": (
        Program(),
        Program(seed=1),
        "parameter and buffer values: rank 0 has ",
        "torch.manual_seed(...) before",
    ),
    "architecture": (Program(), Program(kernel=5), "captured graph: rank 0 has ", "the same code of the model"),
    "shape": (
        Program(),
        Program(width=20),
        "input shapes: rank 0 has [(2, 3, 8, 16)], rank 1 has [(2, 3, 8, 20)]",
        "the same batch: seed the loader alike, and number a DistributedSampler by the data axis alone; or pass each",
    ),
    "batch": (Program(), Program(batch_seed=1), "input values: rank 0 has ", 'with inputs="local"'),
    "batch-order": (Program(), Program(flipped=True), "input values: rank 0 has ", 'with inputs="local"'),
    "memory-format": (Program(), Program(channels_last=True), "memory formats: rank 0 has ", "memory_format=...)"),
    "mode": (Program(rate=0.5), Program(rate=0.5, evaluate=True), "captured graph: rank 0 has ", "one mode (train or"),
    "generator": (Program(rate=0.5), Program(rate=0.5, drawn_seed=1), "generator state: rank 0 has ", "on every rank"),
    "placements": (
        Program(),
        Program(options=(("placements", [Shard(2)]),)),
        "option dims: rank 0 has (3,), rank 1 has (2,)",
        "the same options",
    ),
    "inner-backend": (
        Program(),
        Program(options=(("inner_backend", "aot_eager"),)),
        "option inner_backend: rank 0 has eager, rank 1 has aot_eager",
        "the same options",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_every_rank_is_told_what_differs(pool: RankPool, name: str, way: str) -> None:
    first, second, line, remedy = DISAGREEMENTS[name]
    for found in pool.run(run_program, way, [first, second], ranks=RANKS):
        assert (found.kind, found.is_ours) == ("RankMismatchError", True), found.text
        assert "the ranks disagree" in found.text
        _, differs, what_to_do = found.text.split("\n")  # the first cause alone, and not what follows from it
        assert line in differs
        assert remedy in what_to_do
        assert found.seconds < LIMIT_S


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_agree_run(pool: RankPool, way: str) -> None:
    drawn = Program(rate=0.5)
    not_drawn = [Program(drawn_seed=0), Program(drawn_seed=1)]  # a model that does not draw may find any state
    for programs in ([Program(), Program()], [drawn, drawn], not_drawn):
        assert [found.text for found in pool.run(run_program, way, programs, ranks=RANKS)] == ["", ""]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_cannot_plan_tells_the_others_why(pool: RankPool, way: str) -> None:
    wrong = Program(options=(("placements", [Shard(5)]),))
    other, own = pool.run(run_program, way, [Program(), wrong], ranks=RANKS)
    assert other.kind == "RankMismatchError"
    assert "1 of 2 ranks failed: rank 1: placements split dim 5" in other.text
    assert own.kind == "PlanError"
    assert "placements split dim 5" in own.text
    both = pool.run(run_program, way, [wrong, wrong], ranks=RANKS)
    assert [found.kind for found in both] == ["PlanError", "PlanError"]


def pass_a_wrong_part(rank: int) -> Outcome:
    """Pass, on rank 1, a part that is not what its placements say (runs in a rank process)."""
    torch.compiler.reset()
    spatial = mesh((RANKS,))
    net = transform(Net().double(), mesh=spatial, placements=[Shard(3)], inner_backend="eager")
    part = torch.zeros(2, 3, 8, 6 if rank else 8, dtype=torch.float64)
    strides = torch.empty(2, 3, 8, 16, device="meta").stride()
    image = DTensor.from_local(
        part, spatial, [Shard(3)], run_check=False, shape=torch.Size((2, 3, 8, 16)), stride=strides
    )
    return outcome(lambda: net(image))


def test_a_rank_whose_part_is_refused_tells_the_others_why(pool: RankPool) -> None:
    other, own = pool.run(pass_a_wrong_part, ranks=RANKS)
    assert own.kind == "PlanError"
    assert other.kind == "RankMismatchError"
    assert "rank 1: an input of shape (2, 3, 8, 16) is a DTensor whose part on this rank has shape" in other.text
    assert other.seconds < LIMIT_S / 3


def refuse_late(rank: int, way: str) -> list[Outcome]:
    """Refuse to compile, on rank 1, what the ranks have agreed to; call twice, then another size (on each rank)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = WAYS[way](Net(), {"mesh": mesh((RANKS,)), "placements": [Shard(3)], "inner_backend": "eager"})

    def refuse(*_: Any) -> None:
        msg = "it cannot be done here"
        raise PlanError(msg)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(backend, "on_compiled", [refuse])
        found = [outcome(lambda: net(torch.zeros(2, 3, 8, 16))) for _ in range(2)]
    return [*found, outcome(lambda: net(torch.zeros(2, 3, 8, 20)))]


@pytest.mark.parametrize("way", WAYS)
def test_what_one_rank_refuses_after_all_agreed_is_told_at_each_call(pool: RankPool, way: str) -> None:
    others, own = pool.run(refuse_late, way, ranks=RANKS)
    assert [found.kind for found in own] == ["PlanError", "PlanError", ""]
    assert [found.kind for found in others] == ["RankMismatchError", "RankMismatchError", ""], [f.text for f in others]
    assert all("1 of 2 ranks failed: rank 1: it cannot be done here" in found.text for found in others[:2])
    assert max(found.seconds for found in others) < LIMIT_S / 3


def differ_twice(rank: int) -> list[str]:
    """Call one model, of other weights on each rank, compile it again, and call it again (in a rank process)."""
    torch.manual_seed(rank)
    model = Net()
    found = []
    for _ in range(2):
        torch.compiler.reset()
        net = transform(model, mesh=mesh((RANKS,)), placements=[Shard(3)], inner_backend="eager")
        found.append(outcome(partial(net, torch.zeros(2, 3, 8, 16))).text)
    return found


def test_values_that_differed_are_compared_again(pool: RankPool) -> None:
    for texts in pool.run(differ_twice, ranks=RANKS):
        assert all("parameter and buffer values: rank 0 has " in text for text in texts), texts


def differ_in_values(rank: int, hard: bool) -> tuple[str, Outcome]:
    """Come with other values on rank 1, and late, on request with other work, on rank 2 (in a rank process)."""
    spatial, said = mesh((RANKS + 1,)), []
    work = {agreement.WORK: "other work" if hard and rank == RANKS else "a compiled graph to run"}
    if rank == RANKS:
        time.sleep(GRACE_S + 1)

    def come() -> None:
        said.append(agreement.agree_to_run(spatial, work, {"input x": str(rank % 2)})[1])

    found = outcome(come)
    return "".join(said), found


@pytest.mark.parametrize("hard", [False, True])
def test_ranks_whose_values_differ_wait_for_all(pool: RankPool, hard: bool) -> None:
    for said, found in pool.run(differ_in_values, hard, ranks=RANKS + 1):
        assert found.kind == ("RankMismatchError" if hard else ""), found.text
        if hard:
            assert (
                "work: rank 0 has a compiled graph to run, rank 1 has a compiled graph to run, rank 2 has other"
                in found.text
            )
        else:
            assert "input x: rank 0 has 0, rank 1 has 1, rank 2 has 0" in said


@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_option_is_refused_before_anything_runs(pool: RankPool, way: str) -> None:
    if way == "transform":
        with pytest.raises(TypeError, match="unexpected keyword argument 'placement'"):
            transform(Net(), placement=[Shard(3)])  # type: ignore[call-arg]
        return
    wrong = Program(options=(("placement", [Shard(3)]),))
    for found in pool.run(run_program, way, [wrong, wrong], ranks=RANKS):
        assert found.is_ours
        near = "unknown options ['placement']; near it is placements; "
        assert f"{near}backend='fxshard' takes options with mesh, placements" in found.text


def capture_branch(rank: int, way: str) -> Outcome:
    torch.compiler.reset()
    options = {"mesh": mesh((RANKS,)), "placements": [Shard(3)], "inner_backend": "eager"}
    net = WAYS[way](Branch(), options)
    return outcome(lambda: net(torch.randn(1, 3, 8, 16)))


@pytest.mark.parametrize(("way", "kind"), [("transform", "CaptureError"), ("compile", "Unsupported")])
def test_a_branch_on_data_is_refused_with_the_user_s_line(pool: RankPool, way: str, kind: str) -> None:
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# the line"))
    for found in pool.run(capture_branch, way, ranks=RANKS):
        assert found.kind == kind
        assert f'test_agreement.py", line {line}, in forward' in found.text
        assert "if y.mean() > 0:" in found.text
        assert found.seconds < LIMIT_S
        if way == "transform":
            assert found.is_ours
            assert found.text.startswith("Branch cannot be captured whole: ")


def run_in_eager_mode(rank: int) -> Outcome:
    """Call a transformed model while Dynamo is off (runs in a rank process)."""
    net = transform(nn.Sequential(nn.Conv2d(3, 4, 3)), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager")
    with torch.compiler.set_stance("force_eager"):
        return outcome(lambda: net(torch.zeros(1, 3, 8, 8)))


def test_a_model_that_dynamo_leaves_alone_is_refused(pool: RankPool) -> None:
    for found in pool.run(run_in_eager_mode, ranks=2):
        assert "ran without being captured" in found.text


def call_in_turn(rank: int, way: str, programs: list[list[str]]) -> list[Outcome]:
    """Make this rank's calls of a model that was called before (in a rank process)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net(rate=0.5)
    net: Any = WAYS[way](model, {"mesh": mesh((RANKS,)), "placements": [Shard(3)], "inner_backend": "eager"})
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: net.train()(torch.zeros(2, 3, 8, 16)),
        "eval": lambda: net.eval()(torch.zeros(2, 3, 8, 16)),
        "smaller batch": lambda: net.train()(torch.zeros(1, 3, 8, 16)),
        "nothing": lambda: None,
    }
    calls["train"]()
    calls["eval"]()
    found = [outcome(calls[name]) for name in programs[rank]]
    dist.barrier(mesh((RANKS,)).get_group())  # nobody is in a collective of the model
    return [*found, outcome(calls["train"])]


# id: what each rank calls after all have called the same, and what each is told
LATER: dict[str, tuple[tuple[str, str], list[str]]] = {
    "a-smaller-batch": (
        ("train", "smaller batch"),
        ["work: rank 0 has a compiled graph to run, rank 1 has a graph to compile", "input shapes: rank 0 has [(2, 3"],
    ),
    "another-mode": (("train", "eval"), ["captured graph: rank 0 has "]),
    "the-other-order": (("eval", "smaller batch"), ["input shapes: rank 0 has [(2, 3"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LATER)
def test_ranks_that_part_later_are_told_and_go_on(pool: RankPool, name: str, way: str) -> None:
    (first, second), lines = LATER[name]
    for found, after in pool.run(call_in_turn, way, [[first], [second]], ranks=RANKS):
        assert (found.kind, found.is_ours) == ("RankMismatchError", True), found.text
        assert [line for line in lines if line not in found.text] == []
        assert found.seconds < LIMIT_S / 3
        assert after.text == ""


def miss_a_call(rank: int) -> tuple[list[Outcome], list[str]]:
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(agreement, "patience_s", lambda: 1.0)
        patch.setattr(meeting, "LONG_S", 0.5)
        found = call_in_turn(rank, "transform", [["train"], ["nothing"]])
    return found, [line for line in lines if "this rank waits" in line]


def test_a_rank_that_misses_a_call_is_named_and_told_when_it_comes(pool: RankPool) -> None:
    (first, said), (second, silence) = pool.run(miss_a_call, ranks=RANKS)
    assert any("waits for 0 s to run the model, and 1 of 2 ranks have come" in line for line in said)
    assert silence == []
    assert first[0].text.startswith("rank 1 of the mesh did not call the model within 1 s; at every call the ranks")
    assert second[-1].text.startswith("the other ranks gave up waiting for this one before it came")
    pool.run(leave_a_meeting, ranks=RANKS)  # so that the ranks are in step again


def fail_in_a_collective(rank: int) -> Outcome:
    """Fail on rank 0, while rank 1 got through and comes to its next call later."""
    spatial = mesh((RANKS,))
    if rank == 0:
        return outcome(lambda: agreement.failures_of_others(spatial, "a collective failed: Timed out"))
    time.sleep(GRACE_S + 1)
    return outcome(lambda: agreement.agree_to_run(spatial, {agreement.WORK: "a compiled graph to run"}, {}))


def test_who_got_through_the_collective_that_failed_is_told_at_its_next_call(pool: RankPool) -> None:
    _, other = pool.run(fail_in_a_collective, ranks=RANKS)
    assert other.kind == "RankMismatchError"
    assert "rank 0: a collective failed: Timed out" in other.text
    assert other.seconds < LIMIT_S / 3


def leave_a_meeting(rank: int) -> None:
    if rank == 1:
        agreement.announce_failure(mesh((RANKS,)), "it did not come", Exception())


def build_branch() -> tuple[nn.Module, tuple[Tensor]]:
    return Branch(), (torch.randn(1, 3, 8, 16),)


def compare_pieces(rank: int, case: Case) -> Difference:
    def compiled(model: nn.Module) -> nn.Module:
        options = {"mesh": mesh(case.mesh_shape), "placements": [Shard(3)], "inner_backend": case.inner_backend}
        model.compile(backend="fxshard", options=options)  # in place: the parameters keep their names
        return model

    return compare_models(case, compiled)


def test_a_model_that_torch_compile_breaks_into_pieces_stays_exact(pool: RankPool) -> None:
    for found in pool.run(compare_pieces, Case(build_branch), ranks=RANKS):
        assert found.exact(), str(found)


class Pooled(nn.Module):
    """Code that depends on the data, and then a piece without an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).mean((2, 3))
        if y.mean() > 0:
            y = y * 2
        z: Tensor = self.head(y)
        return z


def build_pooled() -> tuple[nn.Module, tuple[Tensor]]:
    return Pooled(), (torch.randn(1, 3, 8, 16),)


def test_a_piece_without_an_image_runs_whole(pool: RankPool) -> None:
    for found in pool.run(compare_pieces, Case(build_pooled), ranks=RANKS):
        assert found.exact(), str(found)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launch(rank: int, port: int) -> subprocess.Popen[str]:
    """Start the script as torchrun would; it never imports fxshard."""
    torchrun = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    loopback = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    command = [sys.executable, str(SCRIPT)]
    return subprocess.Popen(
        command, env={**os.environ, **torchrun, **loopback}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fresh_interpreters() -> list[dict[str, Any]]:
    """Run the script on every rank and return what each says."""
    port = free_port()
    processes = [launch(rank, port) for rank in range(RANKS)]
    try:
        results = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in results]


@pytest.mark.nightly
def test_a_fresh_interpreter_finds_the_backend_and_gets_clear_errors() -> None:
    said = fresh_interpreters()
    for rank, found in enumerate(said):
        assert not found["imported_before"]
        assert found["error_of_agreeing"] <= 1e-12
        assert found["weights"]["classes"][0] == "RankMismatchError"
        assert "FxShardError" in found["weights"]["classes"]
        assert "parameter and buffer values: rank 0 has " in found["weights"]["text"]
        assert found["weights"]["seconds"] < LIMIT_S
        absent = found["raised_before"]
        if rank == 1:
            assert (absent["classes"][0], absent["text"]) == ("ValueError", "the loader broke")
        else:
            assert absent["classes"][0] == "RankMismatchError"
            assert re.match(r"rank 1 of the mesh did not compile this graph within \d s: it raised", absent["text"])
            assert absent["seconds"] < LIMIT_S

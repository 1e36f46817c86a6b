"""Models that Dynamo takes in pieces: exact, and each break is said once, with its line, its reason and its cost.

What is left to Python runs on the whole image on every rank, and is said, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fxshard import graph_breaks
from fxshard.errors import FxShardError
from tests.ranks.training import assert_same, image, logged, pair, step

if TYPE_CHECKING:
    from fxshard.workers import RankPool

RANKS = 2
SHAPE = (2, 3, 8, 16)
MAP = r"float64\[2, 4, 8, 16\]"
MAP_BYTES = 2 * 4 * 8 * 16 * 8 // RANKS


class Convolutions(nn.Module):
    """What the models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)


class Branch(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.mean() > 0:  # branch
            y = y * 2
        z: Tensor = self.second(y)
        return z


class Printed(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), x.flip(1)
        print(end="")  # noqa: T201  printed
        w: Tensor = self.second(y)
        return w + z.mean()


class InnerPrint(Convolutions):
    def inner(self, y: Tensor) -> Tensor:
        print(end="")  # noqa: T201  inner
        return y.relu()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.inner(self.first(x)))
        return y


class Pooled(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).mean((2, 3))
        print(end="")  # noqa: T201  pooled
        z: Tensor = self.head(y)
        return z


class Switched(Convolutions):
    @torch.compiler.disable
    def off(self, y: Tensor) -> Tensor:
        return y.tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.off(self.first(x)))  # switched
        return y


class Loop(Convolutions):
    def part(self, y: Tensor) -> Tensor:
        z: Tensor = self.second(y)
        return z.tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for _ in range(2):
            print(end="")  # noqa: T201  loop
            y = self.part(y)
        return y


@dataclass(frozen=True)
class Row:
    """What is said of a model.

    Args:
        build: The model.
        line: What its line ends with.
        says: The words behind the line.
    """

    build: type[nn.Module]
    line: str
    says: str


PRINT = r"print\(.*: Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print`.*"
SENDS = rf"a rank sends {MAP_BYTES / 1000:.1f} KB in each forward, and as many backward where the next piece splits it"
ROWS = {
    "a branch": Row(
        Branch,
        "branch",
        rf"if y.mean\(\) > 0:.*: a branch on a value of a tensor; 1 split value is put together .*: {MAP}; {SENDS}",
    ),
    "a print": Row(
        Printed, "printed", rf"{PRINT}; 2 split values are put together on every rank: .*; a rank sends 7\.2 KB"
    ),
    "inside a function": Row(
        InnerPrint, "inner", rf"{PRINT}; 1 split value is put together on every rank: {MAP}; {SENDS}"
    ),
    "of a vector": Row(Pooled, "pooled", rf"{PRINT}; nothing is put together for it\. Each piece is exact"),
    "switched off": Row(Switched, "switched", rf"y: .*: .*`torch.compiler.disable.*; 1 split value .*: {MAP}; {SENDS}"),
    "in a loop": Row(
        Loop,
        "loop",
        rf"{PRINT}; from now on it runs as it is, on the whole image on every rank: exact, and not split$",
    ),
}


def run_pieces(rank: int, name: str) -> tuple[list[str], list[str]]:
    """Compare steps (in a rank process); return what is said of the first size, and of another."""
    said = []
    graph_breaks._reported.clear()
    reference, net = pair(ROWS[name].build, "compile", RANKS)
    for shape in (SHAPE, (2, 3, 8, 20)):
        with logged() as lines:
            for _ in range(2):
                assert_same(step(net, (image(*shape),)), step(reference, (image(*shape),)))
        said.append([line for line in lines if "compilation" not in line])
    return said[0], said[1]


@pytest.mark.parametrize("name", ROWS)
def test_pieces_are_exact_and_breaks_are_said_once(pool: RankPool, name: str) -> None:
    row = ROWS[name]
    source = Path(__file__).read_text().splitlines()
    number = next(i for i, text in enumerate(source, 1) if text.endswith(f" {row.line}") and "  # " in text)
    (first, later), (other, _) = pool.run(run_pieces, name, ranks=RANKS)
    assert len(first) == 1, first
    pattern = rf"WARNING .*test_graph_breaks.py:{number} {row.says}"
    assert re.match(pattern, first[0]), first[0]
    assert later == []
    assert [line.partition(" ")[0] for line in other] == ["INFO"]


class Changeable(Convolutions):
    """Breaks in a loop on one rank."""

    def forward(self, x: Tensor, *, talk: bool) -> Tensor:
        y: Tensor = self.first(x)
        for _ in range(2):
            if talk:
                print(end="")  # noqa: T201
            y = self.second(y)
        return y


def run_alone(rank: int) -> str:
    _, net = pair(Changeable, "compile", RANKS)
    with logged():
        try:
            net(image(*SHAPE), talk=rank == 1)
        except FxShardError as error:
            return str(error)
    return ""


def test_a_rank_that_waits_for_one_that_runs_alone_is_told(pool: RankPool) -> None:
    first, second = pool.run(run_alone, ranks=RANKS)
    assert re.search(
        r"rank 1: Changeable.forward \(.*\) is not captured, because of .*; it runs on this rank alone", first
    )
    assert second == ""


def run_raising(rank: int) -> tuple[str, str]:
    """Pass something that an operator refuses on one rank, at a size that was compiled (in a rank process)."""
    _, net = pair(Branch, "compile", RANKS)
    said = ""
    with logged():
        net(image(*SHAPE))
        try:
            net(image(*SHAPE) if rank == 0 else image(*SHAPE).float())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        output: Any = net(image(*SHAPE))
    return said, str(tuple(output.shape))


def test_a_rank_that_waits_for_one_that_raised_is_told_at_once(pool: RankPool) -> None:
    (first, _), (second, _) = found = pool.run(run_raising, ranks=RANKS)
    assert re.match(r"RankMismatchError: .*rank 1: TorchRuntimeError: .*should be the same", first, re.DOTALL), first
    assert second.startswith("TorchRuntimeError: ")
    assert [shape for _, shape in found] == ["(2, 4, 8, 16)"] * RANKS

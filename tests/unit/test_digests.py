"""What ranks compare says what they share, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard import digests
from fxshard.digests import checksum, collectives_digest, graph_digest

aten = torch.ops.aten


def graph_on(device: str, size: int = 3) -> fx.GraphModule:
    """Return a graph with a factory on a device."""
    graph = fx.Graph()
    graph.output(graph.call_function(aten.arange.default, (size,), {"device": torch.device(device)}))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_graphs_of_two_gpus_are_the_same() -> None:
    assert graph_digest(graph_on("cuda:0")) == graph_digest(graph_on("cuda:1"))


@pytest.mark.parametrize("other", [graph_on("cpu"), graph_on("cuda:0", 4)], ids=["device", "size"])
def test_other_graphs_differ(other: fx.GraphModule) -> None:
    assert graph_digest(graph_on("cuda:0")) != graph_digest(other)


def test_nested_graphs_are_compared() -> None:
    def nesting(size: int) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.get_attr("inner"))
        return fx.GraphModule(torch.nn.ModuleDict({"inner": graph_on("cpu", size)}), graph)

    assert graph_digest(nesting(3)) != graph_digest(nesting(4))


def halves(dtype: torch.dtype = torch.float32, size: int = 2**10) -> Tensor:
    return torch.cat([torch.zeros(size), torch.ones(size)]).to(dtype)


REORDERED: dict[str, tuple[Tensor, Tensor]] = {
    "flipped": (torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0).reshape(2, 3, 4).flip(0)),
    "around-the-middle": (torch.tensor([1, 0, 0, 1]), torch.tensor([0, 1, 1, 0])),
    "transposed": (torch.arange(16.0).reshape(4, 4), torch.arange(16.0).reshape(4, 4).t()),
    "halves": (halves(), halves().flip(0)),
    "long-halves": (halves(size=2**22), halves(size=2**22).flip(0)),
    "bytes": (halves(torch.bool, 7), halves(torch.bool, 7).flip(0)),
    "bfloat16": (halves(torch.bfloat16, 5), halves(torch.bfloat16, 5).roll(1)),
    "one-bit": (torch.zeros(5), torch.zeros(5).index_fill(0, torch.tensor([3]), -0.0)),
}


@pytest.mark.parametrize("pair", REORDERED)
def test_the_order_of_values_is_in_their_checksum(pair: str) -> None:
    first, second = REORDERED[pair]
    assert checksum(first) != checksum(second)
    assert checksum(first) == checksum(first.clone())


def test_a_checksum_of_many_blocks_sees_every_value_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WORDS_AT_A_TIME", 4)
    x = torch.arange(11.0)
    changed = [
        x.roll(4),
        torch.cat([x[4:8], x[:4], x[8:]]),
        *(x.index_fill(0, torch.tensor([i]), -1) for i in range(11)),
    ]
    assert len({checksum(y) for y in (x, *changed)}) == 14


def test_a_checksum_is_of_values_and_not_of_strides() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert checksum(x) == checksum(x.to(memory_format=torch.channels_last))


def collective(name: str, *arguments: Any) -> fx.GraphModule:
    graph = fx.Graph()
    called = graph.call_function(getattr(torch.ops.fxshard, name).default, (graph.placeholder("x"), *arguments))
    graph.output(called)
    return fx.GraphModule(torch.nn.Module(), graph)


GATHER = (3, [0, 4, 8], 1, 0, "group")
MOVE = (2, [0, 4, 8], 3, [0, 4, 8], 0, "group")


@pytest.mark.parametrize(
    ("name", "arguments", "changed"),
    [
        ("all_gather", GATHER, (2, *GATHER[1:])),
        ("all_gather", GATHER, (3, [0, 5, 8], *GATHER[2:])),
        ("redistribute", MOVE, (2, [0, 4, 8], 1, *MOVE[3:])),
        ("all_reduce", ("sum", "group"), ("max", "group")),
    ],
    ids=["dim", "bounds", "to-dim", "op"],
)
def test_collectives_that_do_not_fit_together_differ(
    name: str, arguments: tuple[Any, ...], changed: tuple[Any, ...]
) -> None:
    assert collectives_digest(collective(name, *arguments)) != collectives_digest(collective(name, *changed))


def test_the_places_of_ranks_and_what_they_hold_are_their_own() -> None:
    of_another = (3, [0, 4, 8], 5, 1, "its group")
    assert collectives_digest(collective("all_gather", *GATHER)) == collectives_digest(
        collective("all_gather", *of_another)
    )

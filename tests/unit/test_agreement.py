"""What ranks compare says what they share, and nothing else."""

import pytest
import torch
from torch import fx

from fxshard.agreement import graph_digest

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

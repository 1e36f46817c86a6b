"""The report of a plan: exact counts, checked by hand and against the backward that autograd derives."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from fxshard.ops import Traffic
from fxshard.provenance import origins
from fxshard.report import describe
from fxshard.values import ORIGIN
from tests.rank_graphs import Graphs, graphs, ops, sent

DOUBLE = 8


class Net(nn.Module):
    """Two convolutions with a halo of one column; the first needs no gradient for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y.mean((2, 3))


class Sorted(nn.Module):
    """No rule sorts along a split dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).sort(dim=3).values + x


def net_graphs() -> Graphs:
    return graphs(Net().double(), [torch.randn(2, 3, 6, 8, dtype=torch.float64)])


def test_totals_are_those_counted_by_hand() -> None:
    made = net_graphs()
    total = describe(made.planned, made.local, made.config).total
    column = 2 * 4 * 6 * DOUBLE  # batch, channels, height of the second convolution's input
    assert total.of("halo") == Traffic(2, 2 * column)
    assert total.backward["halo"] == Traffic(1, column)
    assert total.forward["reduce"] == Traffic(1, 2 * 5 * DOUBLE)
    parameters = 4 * 3 * 9 + 4 + 5 * 4 * 9 + 5
    assert total.backward["gradient"] == Traffic(1, parameters * DOUBLE)
    assert total.of("gather", "redistribute") == Traffic()


def test_the_backward_is_what_autograd_derives() -> None:
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    made = graphs(Net().double(), [x])
    joint, total = made.joint(), describe(made.planned, made.local, made.config).total
    assert total.backward["halo"] == sent(joint, ops.halo_accumulate.default)
    assert total.backward["gather"] == sent(joint, ops.all_gather.default)
    reduced = total.of("reduce", "gradient")
    assert reduced.bytes == sent(joint, ops.all_reduce.default).bytes  # before the gradients are put into a bucket


def test_a_gather_is_listed_with_its_reason_and_bytes() -> None:
    made = graphs(Sorted(), [torch.randn(2, 3, 4, 10, dtype=torch.float64)])
    report = describe(made.planned, made.local, made.config)
    (node,) = [n for n in report.nodes if n.reason]
    assert (node.op, node.layout) == ("aten.sort.default", "[R]")
    assert report.reasons == {node.reason: 1}
    assert "sort" in node.reason
    assert "(2 * x).sort(dim=3)" in node.source
    assert report.total.forward["gather"].bytes == 2 * (2 * 3 * 4 * 5) * DOUBLE  # the input's half and the output's


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_sends_to_its_neighbours(rank: int) -> None:
    made = graphs(Net(), [torch.randn(2, 3, 6, 9)], mesh_shape=(3,)).at(rank)
    report = describe(made.planned, made.local, made.config)
    assert report.coords == (rank,)
    assert report.total.forward["halo"].messages == (2 if rank == 1 else 1)


def test_a_node_says_where_it_is_from_and_what_a_rank_has_of_it() -> None:
    made = net_graphs()
    node = next(n for n in describe(made.planned, made.local, made.config).nodes if n.name == "conv2d_1")
    assert (node.op, node.module) == ("aten.conv2d.default", "second")
    assert (node.shape, node.layout, node.local_shape) == ((2, 5, 6, 8), "[S(3; 0,4,8)]", (2, 5, 6, 4))
    assert node.source.startswith("tests/graph/test_report.py:")
    assert "self.second(self.first(x).relu())" in node.source
    assert node.sent.forward["halo"].messages == 1


def test_the_json_has_every_node_and_the_totals() -> None:
    made = net_graphs()
    report = describe(made.planned, made.local, made.config)
    table = json.loads(report.to_json())
    assert (table["version"], table["mesh_shape"], table["coords"]) == (1, [2], [0])
    assert [n["name"] for n in table["nodes"]] == [n.name for n in made.planned.graph.nodes]
    assert table["total"]["backward"]["gradient"]["messages"] == 1


def test_the_text_lists_kinds_and_reasons() -> None:
    made = graphs(Sorted(), [torch.randn(2, 3, 4, 10)])
    text = str(describe(made.planned, made.local, made.config))
    assert text.startswith("rank (0,) of mesh (2,): ")
    assert "forward  gather" in text
    assert "gathered or not split at 1 nodes: " in text


def test_a_local_node_that_names_its_origin_is_believed() -> None:
    made = net_graphs()
    exchange = next(n for n in made.local.graph.nodes if n.target is ops.halo_exchange.default)
    exchange.meta[ORIGIN] = "relu"
    assert dict(origins(made.planned, made.local))[exchange].name == "relu"

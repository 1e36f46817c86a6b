"""ConvNeXt rewritten: one halo exchange for each 7x7 convolution, and the exact traffic of a step.

The image is (1, 3, 64, 256) in float32, the width split.  Stage s has C_s channels and 16 / 2^s rows; a 7x7
convolution sends 3 columns of them to each neighbour::

    atto   C = 40, 80, 160, 320    blocks 2, 2, 6, 2     3 * 4 B * sum(blocks * C * rows) =  92160 B
    tiny   C = 96, 192, 384, 768   blocks 3, 3, 9, 3                                      = 331776 B
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from fxshard.ops import Traffic, node_traffic
from tests.rank_graphs import Graphs, calls, graphs, ops, read_by, sent

HALO_EXCHANGE = ops.halo_exchange.default
CLASSES = 5
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Net:
    """What is known of a ConvNeXt.

    Args:
        channels: Of each stage.
        blocks: Of each stage.
        drawn: Blocks whose drop path has a rate above 0.
        head_dropout: Whether the head draws too.
    """

    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    drawn: int
    head_dropout: bool

    @property
    def halo_bytes(self) -> int:
        """What a rank sends to one neighbour in a forward, at 64 rows."""
        elements = sum(b * c * (16 >> s) for s, (b, c) in enumerate(zip(self.blocks, self.channels, strict=True)))
        return 3 * elements * FLOAT_BYTES


NETS = {
    "convnext_atto": Net((40, 80, 160, 320), (2, 2, 6, 2), drawn=11, head_dropout=True),
    "convnext_tiny": Net((96, 192, 384, 768), (3, 3, 9, 3), drawn=17, head_dropout=False),
}


def build(name: str) -> nn.Module:
    if name == "convnext_atto":
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.3, drop_rate=0.2)
        return model
    import torchvision

    tiny: nn.Module = torchvision.models.convnext_tiny(num_classes=CLASSES, stochastic_depth_prob=0.3)
    return tiny


@cache
def rewritten(name: str, width: int = 256, ranks: int = 2) -> Graphs:
    image = torch.randn(1, 3, 64, width, requires_grad=True)
    return graphs(build(name), (image,), mesh_shape=(ranks,))


@cache
def split_parameters(name: str) -> tuple[int, int]:
    """How many parameters, and bytes of them, work on split images: all but the head's."""
    parameters = build(name).named_parameters()
    split = [p.numel() for n, p in parameters if not n.startswith(("head.", "classifier."))]
    return len(split), sum(split) * FLOAT_BYTES


def kernels(gm: torch.fx.GraphModule, reads: str = "") -> Counter[tuple[int, ...]]:
    """The kernel and stride of the convolutions whose image comes from an operator with ``reads`` in its name."""
    found: Counter[tuple[int, ...]] = Counter()
    for node in calls(gm, torch.ops.aten.conv2d.default):
        weight, stride = node.args[1], node.args[3]
        assert isinstance(weight, torch.fx.Node)
        assert isinstance(stride, list)
        if reads in str(read_by(node).target):
            found[*weight.meta["val"].shape[2:], *stride] += 1
    return found


@pytest.mark.parametrize("name", NETS)
def test_one_halo_exchange_for_each_7x7_convolution_and_for_nothing_else(name: str) -> None:
    local = rewritten(name).local
    blocks = sum(NETS[name].blocks)
    assert kernels(local, "halo_exchange") == {(7, 7, 1, 1): blocks}
    exchanges = calls(local, HALO_EXCHANGE)
    assert len(exchanges) == blocks
    assert all(len(node.users) == 1 for node in exchanges)


@pytest.mark.parametrize(
    ("name", "pointwise"),
    [("convnext_atto", "conv2d"), pytest.param("convnext_tiny", "linear", marks=pytest.mark.nightly)],
)
def test_1x1_4x4_and_2x2_layers_read_their_own_columns(name: str, pointwise: str) -> None:
    local = rewritten(name).local
    blocks = sum(NETS[name].blocks)
    assert kernels(local, "fxshard.slice") == {(4, 4, 4, 4): 1}  # the stem reads the image
    # atto's 1x1 layers are convolutions, tiny's are linear layers over channels-last pixels
    ones = {(1, 1, 1, 1): 2 * blocks} if pointwise == "conv2d" else {}
    assert kernels(local, "aten.") == {(2, 2, 2, 2): 3, **ones}
    linear = [str(read_by(n).target) for n in calls(local, torch.ops.aten.linear.default)]
    assert len(linear) == (2 * blocks if pointwise == "linear" else 0) + 1
    assert not any("halo" in source for source in linear)


@pytest.mark.parametrize("name", NETS)
def test_every_communication_node_of_the_forward(name: str) -> None:
    net, local = NETS[name], rewritten(name).local
    found = Counter(str(n.target) for n in local.graph.nodes if str(n.target).startswith("fxshard."))
    assert found == {
        "fxshard.slice.default": 1,  # the image
        "fxshard.halo_exchange.default": sum(net.blocks),
        "fxshard.sum_gradient.default": split_parameters(name)[0],
        "fxshard.all_reduce.default": 1,  # the mean over the last map
        "fxshard.random.default": net.drawn + net.head_dropout,
    }


@pytest.mark.parametrize("name", NETS)
def test_bytes_of_the_forward(name: str) -> None:
    net, local = NETS[name], rewritten(name).local
    assert sent(local, HALO_EXCHANGE) == Traffic(messages=sum(net.blocks), bytes=net.halo_bytes)
    assert net.halo_bytes == {"convnext_atto": 92160, "convnext_tiny": 331776}[name]
    assert sent(local, ops.all_reduce.default) == Traffic(1, net.channels[-1] * FLOAT_BYTES)


@pytest.mark.parametrize("name", NETS)
def test_numbers_and_bytes_of_the_backward(name: str) -> None:
    net, joint = NETS[name], rewritten(name).joint()
    count, parameter_bytes = split_parameters(name)
    assert sent(joint, ops.halo_accumulate.default) == Traffic(sum(net.blocks), net.halo_bytes)
    assert len(calls(joint, ops.halo_accumulate.default)) == sum(net.blocks)
    mean_bytes = net.channels[-1] * FLOAT_BYTES
    # one all-reduce for each parameter; the forward's mean is in the joint graph too
    assert sent(joint, ops.all_reduce.default) == Traffic(count + 1, parameter_bytes + mean_bytes)
    # the input's gradient is put together: half of the image goes to the other rank
    assert sent(joint, ops.all_gather.default) == Traffic(1, 3 * 64 * 128 * FLOAT_BYTES)


def test_a_rank_in_the_middle_sends_to_both_sides() -> None:
    net = NETS["convnext_atto"]
    first = rewritten("convnext_atto", width=384, ranks=3)
    outer, middle = sent(first.local, HALO_EXCHANGE), sent(first.at(1).local, HALO_EXCHANGE)
    assert outer == Traffic(sum(net.blocks), net.halo_bytes)
    assert middle == outer + outer


def test_bounds_that_are_not_aligned_need_exchanges_at_the_strided_layers() -> None:
    # 40 columns over 4 ranks: bounds at 10, 20, 30 are no multiples of 4
    local = rewritten("convnext_atto", width=40, ranks=4).local
    assert kernels(local, "halo_exchange")[4, 4, 4, 4] == 1


def test_the_printed_graph_names_the_exchange() -> None:
    local = rewritten("convnext_atto").local
    printed = local.code
    assert printed.count("torch.ops.fxshard.halo_exchange.default(") == 12
    # dimension, bounds, and each rank's window
    assert "3, [0, 32, 64], [-3, 29], [35, 67], 'constant', 0.0, 0, 'axis-0')" in printed
    assert "fxshard.halo_exchange" in str(local.graph)


def test_nothing_of_convnext_is_gathered() -> None:
    assert rewritten("convnext_atto").reasons() == []
    assert rewritten("convnext_tiny").reasons() == []


def test_ranks_run_the_same_nodes() -> None:
    graphs_of_rank_0 = rewritten("convnext_atto")
    first, second = graphs_of_rank_0.local, graphs_of_rank_0.at(1).local
    assert [str(n.target) for n in first.graph.nodes] == [str(n.target) for n in second.graph.nodes]
    traffic = [[node_traffic(n) for n in calls(gm, HALO_EXCHANGE)] for gm in (first, second)]
    assert traffic[0] == traffic[1]

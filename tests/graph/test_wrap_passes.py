"""Custom backwards and checkpointed regions as submodules: exact nodes of small graphs, no processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard.passes.config import Config
from fxshard.passes.outline import outline
from fxshard.passes.wrap_checkpoints import wrap_checkpoints
from fxshard.passes.wrap_gradients import wrap_gradients

ops = torch.ops.fxshard


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def custom() -> fx.GraphModule:
    """Return y = round(x) with the gradient 3 g w + s, where s is saved and read by the forward too."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    rounded = graph.call_function(torch.round, (x,))
    arriving = graph.call_function(ops.cotangent.default, (rounded,))
    scaled = graph.call_function(torch.mul, (arriving, w))
    saved = graph.call_function(torch.sin, (w,))
    total = graph.call_function(torch.add, (scaled, saved))
    made = graph.call_function(ops.custom_gradient.default, ([rounded], [arriving], [x], [total]))
    item = graph.call_function(lambda outputs: outputs[0], (made,))
    graph.output((item, graph.call_function(torch.neg, (saved,))))
    return fx.GraphModule({}, graph)


def test_a_custom_backward_leaves_the_graph() -> None:
    gm = wrap_gradients(custom())
    gm.graph.lint()
    gm.recompile()
    assert calls(gm) == ["round_1", "sin", "custom_gradient_0", "_lambda_", "neg"]
    inner = gm.get_submodule("custom_gradient_0.backward_graph")
    assert isinstance(inner, fx.GraphModule)
    assert calls(inner) == ["mul", "sin", "add"]
    x, w = torch.tensor([0.4, 1.6], requires_grad=True), torch.tensor([2.0, 3.0])
    y, _ = gm(x, w)
    y.backward(torch.tensor([1.0, 10.0]))
    torch.testing.assert_close(y.detach(), torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 10.0]) * w + w.sin())


def test_wrapping_twice_changes_nothing() -> None:
    once = wrap_gradients(custom())
    assert calls(wrap_gradients(once)) == calls(once)
    region = wrap_checkpoints(checkpointed(), config=config("eager"))
    assert calls(wrap_checkpoints(region, config=config("eager"))) == calls(region)


def checkpointed() -> fx.GraphModule:
    """Return sin, two regions one behind the other (the first hands on two values), neg."""
    gm = fx.symbolic_trace(_regions)
    for node, number in zip(gm.graph.nodes, (None, None, None, 1, 1, 1, 2, 2, None, None), strict=True):
        if number is not None:
            node.meta |= {"ac_graph_id": number, "recompute": 1}
    return gm


def _regions(x: Tensor, w: Tensor) -> Tensor:
    start = x.sin()
    first = start * w
    second = first.exp()
    third = second + first
    fourth = third.cos()
    fifth = fourth * second
    return fifth.neg()


def config(backend: str) -> Config:
    return Config(mesh_shape=(2,), dims=None, rank=None, inner_backend=backend)


def test_regions_become_checkpoints_where_the_graph_runs_as_it_is() -> None:
    gm = wrap_checkpoints(checkpointed(), config=config("eager"))
    gm.graph.lint()
    gm.recompile()
    assert calls(gm) == ["sin", "checkpoint_0", "getitem", "getitem_1", "checkpoint_1", "getitem_2", "neg"]
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(_regions(x, w).sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad(gm(x, w).sum(), (x, w)), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_backend_that_partitions_gets_the_marks(backend: str) -> None:
    gm = checkpointed()
    before = calls(gm)
    assert calls(wrap_checkpoints(gm, config=config(backend))) == before
    assert [n.meta.get("ac_graph_id") for n in gm.graph.nodes] == [None, None, None, 1, 1, 1, 2, 2, None, None]


def test_what_is_outlined_reads_the_rest_as_inputs() -> None:
    gm = fx.symbolic_trace(_regions)
    nodes = {node.name: node for node in gm.graph.nodes}
    body = [nodes["exp"], nodes["add"]]
    part = outline(gm, body, [nodes["add"], nodes["sin"]])
    assert [node.name for node in part.captured] == ["mul", "sin"]
    mul, sin = torch.tensor(2.0), torch.tensor(3.0)
    assert part.graph_module(mul, sin) == (mul.exp() + mul, sin)

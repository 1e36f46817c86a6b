"""The graph that a write behind autograd's back leaves, and the operator that it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxshard._torch import set_grad_enabled
from fxshard.ops.renew import renew
from fxshard.passes.capture import KEY, capture

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
RENEW = torch.ops.fxshard.renew.default
OFF, ON = (set_grad_enabled, (False,)), (set_grad_enabled, (True,))


class Scaled(nn.Module):
    """A function of a parameter, a buffer and the input."""

    def __init__(self, function: Callable[[Scaled, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def captured(function: Callable[[Scaled, Tensor], Tensor]) -> fx.GraphModule:
    torch.compiler.reset()
    found: list[fx.GraphModule] = []

    def compile_graph(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(capture(gm, inputs))
        return gm.forward

    torch.compile(Scaled(function), backend=compile_graph, fullgraph=True)(torch.ones(3))
    return found[0]


def calls(gm: fx.GraphModule) -> list[Any]:
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [(n.target, n.args) if n.target is set_grad_enabled else n.target for n in nodes]


def unseen(m: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.mul_(2)
    return x * m.scale


def test_what_is_written_in_no_grad_is_renewed_once_and_not_copied() -> None:
    gm = captured(unseen)
    assert calls(gm) == [OFF, aten.mul.Tensor, ON, RENEW, OFF, ON, aten.mul.Tensor]
    (node,) = gm.graph.find_nodes(op="call_function", target=RENEW)
    parameter, written = node.args
    assert (parameter.op, written.target) == ("placeholder", aten.mul.Tensor)
    (updated, _) = next(iter(reversed(gm.graph.nodes))).args[0]
    assert updated is node
    assert gm.meta[KEY].recorded == frozenset()


def through_data(m: Scaled, x: Tensor) -> Tensor:
    m.scale.data *= 2
    return x * m.scale


def test_a_write_through_data_switches_no_gradients() -> None:
    targets = [c for c in calls(captured(through_data)) if c not in (OFF, ON)]
    assert targets == [aten.detach.default, aten.mul.Tensor, RENEW, aten.mul.Tensor]


def buffer_unseen(m: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9)
    return x * m.scale + m.mean


def read_only(m: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.scale.norm()
    return x * m.scale / size


@pytest.mark.parametrize("function", [buffer_unseen, read_only])
def test_what_needs_no_gradient_and_what_is_only_read_is_left_alone(
    function: Callable[[Scaled, Tensor], Tensor],
) -> None:
    assert RENEW not in calls(captured(function))


def test_without_gradients_nothing_is_renewed() -> None:
    with torch.no_grad():
        assert RENEW not in calls(captured(unseen))


def seen(m: Scaled, x: Tensor) -> Tensor:
    m.mean.add_(m.scale)
    return x.mul_(2) + m.mean


def test_an_input_whose_new_value_has_a_history_is_recorded() -> None:
    gm = captured(seen)
    assert RENEW not in calls(gm)
    names = [str(getattr(n, "_dynamo_source").name) for n in gm.graph.nodes if n.op == "placeholder"]  # noqa: B009
    assert [("mean" in names[number]) for number in gm.meta[KEY].recorded] == [True]


def test_renew_is_registered_right() -> None:
    old = torch.ones(2, 3, requires_grad=True)
    torch.library.opcheck(renew, (old, torch.rand(2, 3)), test_utils=("test_schema", "test_faketensor"))
    w = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda w: renew(w, w.detach() + 2).pow(3), w)

"""A transformed module is told from its model by nothing but how it runs."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fxshard.api import transform
from fxshard.dry_run import plan
from fxshard.transformed_module import twin

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """A module with a reference back to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.itself = [self]

    def forward(self, x: Tensor, *, offset: float = 0.0) -> Tensor:
        """Return the sum."""
        y: Tensor = self.linear(x) + offset
        return y


def sharded(model: nn.Module) -> nn.Module:
    return transform(model, inner_backend="eager")


def test_a_copy_has_everything_of_its_own() -> None:
    net = sharded(Net())
    copied = copy.deepcopy(net)
    assert type(copied) is Net
    assert list(copied.state_dict()) == list(net.state_dict())
    assert all(a is not b and torch.equal(a, b) for a, b in zip(copied.parameters(), net.parameters(), strict=True))
    assert copied.itself[0].linear is copied.linear
    copied.eval()
    assert net.training
    assert copied.forward.__self__ is copied  # type: ignore[attr-defined]


def test_a_copy_is_made_once() -> None:
    net = sharded(Net())
    first, second = copy.deepcopy([net, net])
    assert first is second


def test_a_parametrized_module_is_copied() -> None:
    net = sharded(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    copied, x = copy.deepcopy(net), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = twin(net)(x)
        net.parametrizations.weight.original0.zero_()  # type: ignore[union-attr, operator]
        torch.testing.assert_close(copied(x), expected)
        torch.testing.assert_close(copied.forward(x), expected)


def test_the_forward_has_the_model_s_signature_and_words() -> None:
    model = Net()
    forward = sharded(model).forward
    assert inspect.signature(forward) == inspect.signature(model.forward)
    assert forward.__doc__ == "Return the sum."


def test_the_twin_of_a_transformed_module_is_not() -> None:
    model = Net()
    found = twin(sharded(sharded(model)))
    assert found.__dict__.keys() == model.__dict__.keys()
    assert found.linear is model.linear


def test_what_the_user_puts_in_place_of_the_forward_stays() -> None:
    net = sharded(Net())
    net.forward = lambda x: x + 1
    for module in (net, copy.deepcopy(net), sharded(net)):
        assert torch.equal(module(torch.zeros(1)), torch.ones(1))


CALLS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "call": lambda net: net,
    "forward": lambda net: net.forward,
}


@pytest.mark.parametrize("name", CALLS)
def test_hooks_run_for_calls_and_not_for_the_forward(name: str) -> None:
    model, x = Net(), torch.ones(3)
    model.register_forward_hook(lambda _module, _args, output: output * 2)
    torch.testing.assert_close(CALLS[name](sharded(model))(x), CALLS[name](model)(x))


def test_the_plan_of_a_transformed_module_is_the_model_s() -> None:
    model, x = nn.Conv2d(3, 4, 5, padding=2), torch.empty(1, 3, 8, 16)
    found, expected = (plan(m, x, world_size=2).report for m in (sharded(model), model))
    assert found.to_json() == expected.to_json()
    assert {n.source for n in found.nodes} == {""}  # none is the user's


class Scripted(nn.Module):
    """A model that was written to be scripted."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if torch.jit.isinstance(x, Tensor) else x


def test_dynamo_learns_of_torch_before_a_function_is_replaced() -> None:
    torch._dynamo.trace_rules.clear_lru_cache()
    assert sharded(Scripted())(-torch.ones(1)) == 0
    assert sharded(Scripted()).forward(-torch.ones(1)) == 0

"""Runs a step of a model after replace_random, under an inner backend, against the same step in eager mode."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard._torch import lookup_backend
from fxshard.passes.capture import KEY, capture
from fxshard.passes.expand_random import expand_random
from fxshard.passes.replace_random import replace_random

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

SEED = 11


class Of(nn.Module):
    """A function with one parameter, so that gradients have somewhere to go."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


@dataclass
class Compiler:
    """A Dynamo backend: capture, replace_random, then an inner backend by name."""

    inner: str
    before: GraphModule | None = None
    after: GraphModule | None = None

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch._inductor.config.patch(fallback_random=True):  # draws that nobody uses survive the capture
            graph = capture(gm, inputs)
        self.before = copy.deepcopy(graph)
        updates = graph.meta[KEY].updates
        graph = replace_random(expand_random(graph))
        graph.graph.lint()
        graph.recompile()
        self.after = graph
        compiled = lookup_backend(self.inner)(graph, list(inputs))

        def run(*args: Any) -> Any:
            outputs = compiled(*args)
            for target, value in zip(updates, outputs, strict=False):
                args[target].data.copy_(value)
            return outputs[len(updates) :]

        return run

    def targets(self) -> list[Any]:
        assert self.after is not None
        return [n.target for n in self.after.graph.nodes if n.op == "call_function"]


@dataclass
class Outcome:
    """What a step left behind."""

    outputs: list[Tensor]
    input_gradient: Tensor | None
    gradients: list[Tensor | None]
    state: Tensor


def generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def step(function: Callable[..., Any], model: nn.Module, x: Tensor) -> Outcome:
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(SEED)
    result = function(x)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    state = generator_state(x.device)
    weights = torch.Generator().manual_seed(3)
    terms = [
        (o * torch.rand(o.shape, generator=weights, dtype=torch.float64).to(o)).sum()
        for o in outputs
        if o.requires_grad
    ]
    if terms:
        sum(terms[1:], start=terms[0]).backward()
    gradients = [p.grad for p in model.parameters()]
    assert torch.equal(state, generator_state(x.device)), "the backward drew numbers"
    return Outcome([o.detach() for o in outputs], x.grad, gradients, state)


def assert_matches(model: nn.Module, x: Tensor, inner: str, *, exact: bool = True) -> Compiler:
    torch._dynamo.reset()
    compiler = Compiler(inner)
    expected = step(model, model, x)
    actual = step(torch.compile(model, backend=compiler, fullgraph=True, dynamic=False), model, x)
    assert torch.equal(actual.state, expected.state), "the generator was left in another state"
    tolerance = 0.0 if exact else None
    torch.testing.assert_close(actual.outputs, expected.outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.input_gradient, expected.input_gradient, rtol=tolerance, atol=tolerance)
    # A parameter's gradient is a sum over the image, whose order a backend may choose.
    torch.testing.assert_close(actual.gradients, expected.gradients)
    assert compiler.after is not None
    return compiler


def image(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3, 5, 7)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

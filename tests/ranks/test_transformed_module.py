"""A transformed module stays transformed, whatever is made of it; what cannot be is refused, and never runs alone.

Each rank passes its part of the image, so that a module that ran on one device would give the map of a part.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxshard.api import transform
from fxshard.errors import FxShardError
from fxshard.trace import cotangent_loss
from fxshard.workers import mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

RANKS = 2


class Net(nn.Module):
    """A convolution and a mean over the image, with an attribute of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), 2.0

    def forward(self, x: Tensor, offset: float = 0.0) -> Tensor:
        y = self.norm(self.conv(x))
        return (y - y.mean((2, 3), keepdim=True).sigmoid()) * (self.scale if self.training else 3.0) + offset


class Around(nn.Module):
    """A module that has another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * 2


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def image(step: int = 0) -> Tensor:
    return torch.randn(2, 3, 6, 17, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def part_of(x: Tensor, rank: int) -> Tensor:
    return x.tensor_split(RANKS, 3)[rank].clone()


def sharded(model: Any) -> Any:
    return transform(model, mesh=mesh((RANKS,)), placements=[Shard(3)], inner_backend="eager", inputs="local")


def averaged(net: nn.Module) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def half(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that calls the module and does something before and after."""
    return lambda x: net(x * 2 / 2) * 2 / 2


def compiled(run: Any, backend: str = "eager", **how: Any) -> Any:
    """Return ``torch.compile``'s, whose types know no mesh among the options."""
    compiler: Any = torch.compile
    return compiler(run, backend=backend, **how)


def compiled_in_place(net: nn.Module) -> nn.Module:
    around = nn.Sequential(net)
    around.compile(backend="eager")
    return around


def wrapped_forward(net: nn.Module) -> nn.Module:
    forward = net.forward
    net.forward = lambda x, offset=1.0: forward(x, offset=offset) - offset
    return net


def with_own_forward(net: nn.Module) -> nn.Module:
    """Return the copy of a module whose model had a forward of its own, bound to it."""
    model = build()
    model._forward_pre_hooks.update(net._forward_pre_hooks)
    model.forward = MethodType(Net.forward, model)  # type: ignore[method-assign]
    made = sharded(model)
    copied: nn.Module = copy.deepcopy(made)
    nn.init.zeros_(made.conv.weight)
    return copied


def from_symbolic_trace(_net: nn.Module) -> nn.Module:
    copied: nn.Module = copy.deepcopy(sharded(torch.fx.symbolic_trace(build())))
    return copied


def functional(net: nn.Module) -> Callable[[Tensor], Tensor]:
    state = {name: p.detach().clone() for name, p in net.named_parameters()}
    nn.init.zeros_(next(net.parameters()))
    return lambda x: torch.func.functional_call(net, state, (x,))


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "itself": lambda net: net,
    "deepcopy": copy.deepcopy,
    "deepcopy of a copy": lambda net: copy.deepcopy(copy.deepcopy(net)),
    "deepcopy around": lambda net: copy.deepcopy(nn.Sequential(net)),
    "deepcopy with a forward of its own": with_own_forward,
    "deepcopy of a graph module": from_symbolic_trace,
    "averaged": averaged,
    "functional_call": functional,
    "wrapped forward": wrapped_forward,
    "transform again": sharded,
    "transform around": lambda net: sharded(nn.Sequential(net)),
    "compile": compiled,
    "compile around": lambda net: compiled(nn.Sequential(net)),
    "compile a function": lambda net: compiled(half(net)),
    "compile in place around": compiled_in_place,
    "compile with fxshard around": lambda net: compiled(
        nn.Sequential(net), "fxshard", options={"mesh": mesh((RANKS,)), "inner_backend": "eager"}
    ),
    "forward": lambda net: net.forward,
    "compile the forward": lambda net: compiled(net.forward),
}
PAST_HOOKS = ("forward", "compile the forward", "deepcopy of a graph module")
"""Ways on which hooks are left behind; a copied graph module has none."""


def centre(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    """Take the mean of the whole image away (a forward pre-hook)."""
    return args[0] - args[0].mean((2, 3), keepdim=True).sin()


def run_way(rank: int, way: str, hooked: bool) -> None:
    """Run a module that was made of a transformed one as ``way`` says (in a rank process)."""
    torch.compiler.reset()
    reference, net = build(), sharded(build())
    if hooked:
        net.register_forward_pre_hook(centre)
    if hooked and way not in PAST_HOOKS:
        reference.register_forward_pre_hook(centre)
    run, x = WAYS[way](net), image()
    expected = reference(x)
    for _ in range(2):
        torch.testing.assert_close(run(part_of(x, rank)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("way", WAYS)
def test_it_runs_over_the_ranks(pool: RankPool, way: str, hooked: bool) -> None:
    pool.run(run_way, way, hooked, ranks=RANKS)


def twice_off(net: nn.Module, x: Tensor) -> Tensor:
    """Call the module when it was captured, and Dynamo is off."""
    net(x)
    with torch.compiler.set_stance("force_eager"):
        found: Tensor = net(x)
        return found


def forward_off(net: nn.Module, x: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return net.forward(x)


STATE = "a transformed Net cannot be pickled or copied by copy.copy: .* save its state_dict"
TRACED = "cannot record a transformed Net, which runs on several ranks; give it the model as it was before"
WHOLE = "fxshard captures a transformed Net whole, on its own: compile what is around it without fullgraph=True"
OFF = "Net ran without being captured: Dynamo is switched off"
REFUSALS: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "pickle": (lambda net, _: pickle.dumps(net), STATE),
    "torch.save": (lambda net, _: torch.save(Around(net), io.BytesIO()), STATE),
    "copy.copy": (lambda net, x: copy.copy(net)(x), STATE),
    "compile in place": (lambda net, _: net.compile(), "a transformed Net is compiled as it is"),
    "compile whole": (lambda net, x: compiled(net, fullgraph=True)(x), WHOLE),
    "compile whole around": (lambda net, x: compiled(Around(net), fullgraph=True)(x), WHOLE),
    "export": (lambda net, x: torch.export.export(net, (x,)), f"torch.export {TRACED}"),
    "export strict": (lambda net, x: torch.export.export(Around(net), (x,), strict=True), WHOLE),
    "symbolic_trace": (lambda net, _: torch.fx.symbolic_trace(net), f"torch.fx {TRACED}"),
    "symbolic_trace around": (lambda net, _: torch.fx.symbolic_trace(Around(net)), f"torch.fx {TRACED}"),
    "make_fx": (lambda net, x: make_fx(net)(x), f"torch.fx {TRACED}"),
    "jit.trace": (lambda net, x: torch.jit.trace(Around(net), x), f"torch.jit.trace {TRACED}"),
    "Dynamo off": (twice_off, OFF),
    "Dynamo off, forward": (forward_off, OFF),
}


def refuse(rank: int, name: str) -> str:
    """Return what is said to one who makes ``name`` of a transformed module (runs in a rank process)."""
    torch.compiler.reset()
    try:
        REFUSALS[name][0](sharded(build()), part_of(image(), rank))
    except (FxShardError, torch._dynamo.exc.Unsupported) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_run_on_one_device_is_refused(pool: RankPool, name: str) -> None:
    for said in pool.run(refuse, name, ranks=RANKS):
        assert re.search(REFUSALS[name][1], said), said


@dataclass(frozen=True)
class Averages:
    """What an exponential average of the weights is after training, and gives.

    Args:
        state: Its parameters and buffers.
        output: Of the averaged model in eval mode.
        gradients: Of a loss of the averaged model, for its own parameters.
    """

    state: dict[str, Tensor]
    output: Tensor
    gradients: list[Tensor]


def train_average(net: nn.Module, cut: Callable[[Tensor], Tensor]) -> Averages:
    average = averaged(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        cotangent_loss(net(cut(image(step)))).backward()
        optimizer.step()
        average.update_parameters(net)
    optimizer.zero_grad()
    cotangent_loss(average(cut(image(7)))).backward()
    assert all(p.grad is None for p in net.parameters())
    gradients = [p.grad for p in average.parameters() if p.grad is not None]
    with torch.no_grad():
        return Averages(dict(average.state_dict()), average.eval()(cut(image(8))), gradients)


def train_average_on_rank(rank: int) -> Averages:
    torch.compiler.reset()
    return train_average(sharded(build()), lambda x: part_of(x, rank))


def test_an_exponential_average_of_the_weights_is_that_of_one_device(pool: RankPool) -> None:
    expected = train_average(build(), lambda x: x)
    assert len(expected.gradients) == len(list(build().parameters()))
    first, second = pool.run(train_average_on_rank, ranks=RANKS)
    torch.testing.assert_close(first.state, second.state, rtol=0, atol=0)
    torch.testing.assert_close(first.state, expected.state, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(first.output, expected.output, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(first.gradients, expected.gradients, rtol=1e-9, atol=1e-11)


def functional_gradients(rank: int) -> None:
    """Take the gradient of tensors that stand in for the parameters (runs in a rank process)."""
    torch.compiler.reset()
    reference, net = build(), sharded(build())
    state = {name: p.detach().clone().requires_grad_() for name, p in reference.named_parameters()}
    cotangent_loss(torch.func.functional_call(net, state, (part_of(image(), rank),))).backward()
    cotangent_loss(reference(image())).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state[name].grad, parameter.grad, rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in net.parameters())


def test_functional_call_gives_the_gradients_of_what_it_was_given(pool: RankPool) -> None:
    pool.run(functional_gradients, ranks=RANKS)


def write_to_outputs(rank: int, backend: str) -> list[float]:
    """Return how far outputs and gradients are from one device's when the output is written to (in a rank process)."""
    torch.compiler.reset()
    found = []
    for ranks in (1, 2):
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)).double()
        x = torch.randn(2, 3, 8, 18, dtype=torch.float64, requires_grad=True)
        if ranks == 2:
            net = transform(net, mesh=mesh((2,)), placements=[Shard(3)], inner_backend=backend)
        y = net(x)
        y += 1
        y[..., 0] = 0
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_may_be_written_to(pool: RankPool, backend: str) -> None:
    for differences in pool.run(write_to_outputs, backend, ranks=2):
        assert max(differences) < 1e-12

"""One training step of a graph, node by node, from a fixed seed and fixed cotangents, with all that it made kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch import tag_activation_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fxshard.passes.capture import Captured

SEED = 0
aten = torch.ops.aten
UNWRITTEN = (
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)
"""What returns memory as it is: there is no value to keep."""


@dataclass
class Ran:
    """What a graph left behind.

    Args:
        leaves: Its inputs, with their gradients, as the run left them.
        outputs: What it returned.
        values: What each node made, when it made it; not of memory that nothing was written to.
        gradients: Of each value; not of one that was written to since.
    """

    leaves: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps each node's tensor."""

    def __init__(self, gm: fx.GraphModule, ran: Ran) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.ran = ran
        self.made: dict[str, tuple[Tensor, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep what it made."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op != "output":
            if result.requires_grad and not result.is_leaf:
                result.retain_grad()
            self.made[n.name] = result, result._version
            if getattr(n.target, "overloadpacket", None) not in UNWRITTEN:
                self.ran.values[n.name] = result.detach().clone()
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target; of an activation checkpoint, its region: autograd would refuse what the region writes to."""
        if target is not tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        region, *inputs = args
        return fx.Interpreter(region).run(*inputs)

    def take_gradients(self) -> None:
        """Keep the gradients that the backward left."""
        for name, (value, version) in self.made.items():
            if value.requires_grad and value._version == version:
                self.ran.gradients[name] = value.grad


def run_graph(gm: fx.GraphModule, feed: Sequence[Any], captured: Captured, skipped: int = 0) -> Ran:
    """Run a graph forward and backward, node by node.

    Args:
        gm: Any graph with the captured graph's inputs.
        feed: The inputs; not changed.
        captured: Says which of them need a gradient.
        skipped: How many outputs come before the model's own.
    """
    ran = Ran(leaves_of(feed, captured))
    recorder = _Recorder(gm, ran)
    train(recorder.run, ran, captured, skipped)
    recorder.take_gradients()
    return ran


def leaves_of(feed: Sequence[Any], captured: Captured) -> list[Any]:
    """Return copies of the inputs for one step."""
    return [
        x.detach().clone().requires_grad_(needs) if isinstance(x, torch.Tensor) else x
        for x, needs in zip(feed, captured.requires_grad, strict=True)
    ]


def train(run: Callable[..., Any], ran: Ran, captured: Captured, skipped: int = 0) -> None:
    """Call ``run`` with ``ran.leaves``, and its backward from the same cotangents each time.

    Args:
        run: A graph's function.
        ran: Gets the outputs; its leaves get gradients.
        captured: Says whether gradients are recorded.
        skipped: How many outputs come before the model's own.
    """
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(captured.grad_enabled):
        ran.outputs = list(run(*ran.leaves))
    generator = torch.Generator().manual_seed(SEED)
    wanted = [o for o in ran.outputs[skipped:] if isinstance(o, torch.Tensor) and o.requires_grad]
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in wanted]
    if wanted:
        torch.autograd.backward(wanted, cotangents)

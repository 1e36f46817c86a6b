"""Trains a small model with autocast applied in its graph, against the same model under eager autocast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fxshard.compare import difference
from fxshard.passes.apply_autocast import apply_autocast
from fxshard.passes.autocast_effect import CAST
from fxshard.passes.capture import KEY, capture
from fxshard.passes.lower import without_autocast
from fxshard.trace import Case, build_model, run_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule, Node

    from fxshard.compare import Difference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Layers, and a function that uses some of them."""

    def __init__(self, function: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.batch_norm, self.group_norm, self.layer_norm = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(6)
        self.linear, self.bilinear, self.prelu = nn.Linear(6, 6), nn.Bilinear(6, 6, 6), nn.PReLU(4)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Under(nn.Module):
    """A model called within an autocast region."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.net(x)


@dataclass
class Compiler:
    """A Dynamo backend: applies autocast, captures, and runs what was captured without autocast."""

    given: GraphModule | None = None
    applied: GraphModule | None = None

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.given, self.applied = gm, apply_autocast(gm, inputs)
        self.applied.graph.lint()
        with without_autocast():
            captured = capture(self.applied, inputs)
        updates = captured.meta[KEY].updates

        def run(*args: Any) -> Any:
            with without_autocast():
                outputs = captured(*args)
            for target, value in zip(updates, outputs, strict=False):
                args[target].data.copy_(value)
            return outputs[len(updates) :]

        return run

    def nodes(self) -> list[Node]:
        """Return the nodes of the graph with autocast applied, but for inputs and the output."""
        assert self.applied is not None
        return [n for n in self.applied.graph.nodes if n.op not in {"placeholder", "output"}]

    def casts(self) -> list[tuple[str, torch.dtype]]:
        """Return what is cast, by name, and the dtypes."""
        return [(str(n.args[0]), cast("torch.dtype", n.kwargs["dtype"])) for n in self.nodes() if n.target is CAST]

    def names(self) -> list[str]:
        """Return the names of the nodes that are no casts."""
        return [n.name for n in self.nodes() if n.target is not CAST]


def build(function: Callable[[Net, Tensor], Any], dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    return Under(Net(function), dtype), (torch.randn(2, 4, 5, 6) + 0.5,)


def compiled(model: nn.Module) -> Compiler:
    """Compile ``model`` in place and return its backend."""
    torch.compiler.reset()
    compiler = Compiler()
    model.compile(backend=compiler, fullgraph=True, dynamic=False)
    return compiler


def compared(
    function: Callable[[Net, Tensor], Any], dtype: torch.dtype = BF16, *, ambient: bool = True
) -> tuple[Difference, Compiler]:
    """Return how far a model is from eager autocast, and its backend.

    Args:
        function: What the model does.
        dtype: Of autocast.
        ambient: Whether the region is outside of the compiled graph, or in it.
    """
    case = Case(build=partial(build, function, dtype), dtype=FP32)
    reference = run_steps(*build_model(case), case)
    model, inputs = build_model(case)
    compiler = compiled(cast("Under", model).net if ambient else model)
    return difference(reference, run_steps(model, inputs, case)), compiler

"""The graphs of one rank without processes or groups: what the passes make of a model for a made-up mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch import make_fx
from fxshard.emitter import Rank
from fxshard.ops import Traffic, node_traffic
from fxshard.passes.capture import KEY
from fxshard.passes.config import Config
from fxshard.passes.pipeline import localized, planned
from fxshard.values import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.fx import GraphModule, Node

    from fxshard.values import NodePlan

ops = torch.ops.fxshard


@dataclass(frozen=True)
class Graphs:
    """What one rank compiles.

    Args:
        planned: The global graph, a plan on every node.
        local: The rank's graph.
        config: The made-up mesh and the rank.
    """

    planned: GraphModule
    local: GraphModule
    config: Config

    def at(self, *coords: int) -> Graphs:
        """The graphs of the rank at other coordinates: the same plan, rewritten for it."""
        assert self.config.rank is not None
        config = replace(self.config, rank=Rank(coords, self.config.rank.groups))
        return Graphs(self.planned, localized(self.planned, config=config), config)

    def plan(self, name: str) -> NodePlan:
        """The plan of the only node whose target is the overload ``name``, such as "aten.relu.default"."""
        (node,) = (n for n in self.planned.graph.nodes if str(n.target) == name)
        found = plan_of(node)
        assert found is not None
        return found

    def targets(self) -> list[str]:
        """The operators of the planned graph, in order."""
        return [str(n.target) for n in self.planned.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]

    def layouts(self) -> dict[str, list[str]]:
        """For each operator of the planned graph, how its first output is placed, in order."""
        found: dict[str, list[str]] = {}
        for node in self.planned.graph.nodes:
            plan = plan_of(node)
            if plan is not None and isinstance(node.target, torch._ops.OpOverload):
                found.setdefault(str(node.target).removeprefix("aten."), []).append(str(plan.outputs[0]))
        return found

    def reasons(self) -> list[str]:
        """Why something is gathered, in order."""
        plans = (plan_of(n) for n in self.planned.graph.nodes)
        return [p.reason for p in plans if p is not None and p.reason]

    def joint(self) -> GraphModule:
        """The local graph with its backward, for a gradient of 1 of its only output."""
        fakes = [n.meta["val"] for n in self.local.graph.nodes if n.op == "placeholder"]
        needed = self.planned.meta[KEY].requires_grad

        def step(*inputs: Tensor) -> Any:
            leaves = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, needed, strict=True)]
            (output,) = self.local(*leaves)
            return torch.autograd.grad(output, [x for x in leaves if x.requires_grad], torch.ones_like(output))

        with fakes[0].fake_mode:
            return make_fx(step, tracing_mode="real")(*fakes)


def graphs(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    mesh_shape: tuple[int, ...] = (2,),
    dims: tuple[int, ...] | None = (3,),
) -> Graphs:
    """Return what the first rank of a made-up mesh compiles for a model.

    Args:
        model: Any module, in the mode that is to be compiled.
        inputs: Its positional inputs.
        mesh_shape: Ranks per mesh axis.
        dims: The dimension that each axis splits; None leaves the choice to the planner.
    """
    names = tuple(f"axis-{axis}" for axis in range(len(mesh_shape)))
    config = Config(mesh_shape, dims, Rank((0,) * len(mesh_shape), names))
    made: list[Graphs] = []

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = planned(gm, example_inputs, config=config)
        made.append(Graphs(plan, localized(plan, config=config), config))
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=False)(*inputs)
    (found,) = made
    return found


def calls(gm: GraphModule, op: Any) -> list[Node]:
    """The nodes that call one overload."""
    return [n for n in gm.graph.nodes if n.target is op]


def read_by(node: Node) -> Node:
    """The node whose value is the first argument of ``node``."""
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    return source


def sent(gm: GraphModule, op: Any) -> Traffic:
    """What the rank sends in all calls of one communication operator."""
    return sum((node_traffic(n) for n in calls(gm, op)), Traffic())

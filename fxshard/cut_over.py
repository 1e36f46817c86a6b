"""Which dimension is split, and which nodes every rank runs whole because that is cheaper: small late maps, mostly.

The plan that splits whatever can be split is made first; it says what each node would send.  What each node costs
split and whole, and what its value costs where the one kind reads the other, goes to :mod:`fxshard.cut`, whose
optimum is exact; the nodes that it leaves whole are planned so.

The costs are those of a rank in the middle of the mesh, on every rank: all have to decide the same.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fxshard.candidates import mesh_shapes, splits
from fxshard.cost import compute_ns, gather_ns, share_of, traffic_ns
from fxshard.cut import Value, cheapest_split, cost_of
from fxshard.emitter import Rank
from fxshard.layout import Shard
from fxshard.otherwise import Turns
from fxshard.passes import pipeline
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.outline import copied
from fxshard.passes.plan import image_inputs, split_dims, splits_again
from fxshard.provenance import origins
from fxshard.report import Estimate, communications
from fxshard.rules import OpCall
from fxshard.values import is_tensor, passes_gradient, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from fxshard.devices import Device, Link
    from fxshard.passes.config import Config

ops = torch.ops.fxshard
WHOLE = "what is whole in any case"
"""Stands for the readers that cannot be split."""


@dataclass(frozen=True)
class Choice:
    """A plan that was tried.

    Args:
        graph: With a layout on every node.
        local: The graph of the configuration's rank.
        config: What was asked, and decided.
        waits_ns: How long the rank waits for what it sends for each node, by name.
        step_ns: How long a step takes the busiest rank, as estimated.
        values: The nodes that can be split and what they cost, from which the choice was made.
    """

    graph: fx.GraphModule
    local: fx.GraphModule
    config: Config
    waits_ns: Mapping[str, int]
    step_ns: int
    values: Mapping[str, Value] = field(default_factory=dict)


def planned(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, config: Config, device: Device | None
) -> tuple[fx.GraphModule, Config]:
    """Return the captured graph with a layout on every node, and what was decided.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs.
        config: What is asked.
        device: Of the table; None splits whatever can be split, along the largest dimensions where none are asked for.
    """
    if device is None:
        return pipeline.planned(gm, example_inputs, config=config), config
    best = choices(pipeline.captured(gm, example_inputs, config=config), config=config, device=device)[0]
    return best.graph, dataclasses.replace(best.config, rank=config.rank)


def choices(
    captured: fx.GraphModule, *, config: Config, device: Device, any_mesh: bool = False, every: bool = False
) -> list[Choice]:
    """Return the plans that were tried, the quickest first.

    Args:
        captured: The functional global graph.
        config: What is asked.
        device: Of the table.
        any_mesh: Whether the mesh may have another shape of as many ranks.
        every: Whether to return also those of which the work alone takes longer than another's whole step.
    """
    shape = max((tuple(tensor_value(n).shape) for n in image_inputs(captured)), key=len, default=())
    meshes = mesh_shapes(math.prod(config.mesh_shape), shape) if any_mesh else (config.mesh_shape,)
    asked = [in_the_middle(dataclasses.replace(config, mesh_shape=mesh)) for mesh in meshes]
    ways = [way for one in asked for way in _splits(captured, one, shape)]
    graphs = [_laid_out(captured, way) for way in ways]
    works = [work_ns(graph, device)[0] for graph in graphs]
    found: list[Choice] = []
    for work, graph, way in sorted(zip(works, graphs, ways, strict=True), key=operator.itemgetter(0)):
        if every or not found or work < min(choice.step_ns for choice in found):
            found.append(_tried(_timed(graph, way, device), device))
    return sorted(found, key=lambda choice: choice.step_ns)


def _splits(captured: fx.GraphModule, config: Config, shape: tuple[int, ...]) -> list[Config]:
    """Return the configuration with each way to split the images: the default one first, then other dimensions."""
    default = split_dims(captured, config)
    if config.dims is not None or config.parts or not shape:
        return [config]
    ways = dict.fromkeys([default, *splits(shape, config.mesh_shape)])
    return [dataclasses.replace(config, dims=way) for way in ways]


def _tried(split: Choice, device: Device) -> Choice:
    """Return the best plan of a mesh and a split, given the one that splits whatever can be."""
    values = costs(split, device)
    whole = cheaper_whole(values, device)
    made = as_asked(split.graph, dataclasses.replace(split.config, whole=whole), device) if whole else split
    return dataclasses.replace(made, values=values)


def as_asked(graph: fx.GraphModule, config: Config, device: Device) -> Choice:
    """Return the plan that a configuration says: whole what it names, split whatever else can be.

    Args:
        graph: A captured graph, or a planned one; it is left as it is.
        config: The mesh, and whose local graph.
        device: Of the table.
    """
    return _timed(_laid_out(graph, config), config, device)


def _laid_out(graph: fx.GraphModule, config: Config) -> fx.GraphModule:
    made = copied(graph)
    made.meta.update(graph.meta)
    return pipeline.laid_out(made, config=config)


def _timed(graph: fx.GraphModule, config: Config, device: Device) -> Choice:
    local = pipeline.localized(graph, config=config)
    waits = waits_ns(graph, local, config, device.link)
    return Choice(graph, local, config, waits, work_ns(graph, device)[0] + sum(waits.values()))


def waits_ns(planned_graph: fx.GraphModule, local: fx.GraphModule, config: Config, link: Link) -> dict[str, int]:
    """Return how long a rank waits for what it sends for each node of a planned graph, by name.

    A sum that is put together counts for the node whose terms they are: whole, it would need none.

    Args:
        planned_graph: With a layout on every node.
        local: The graph of the configuration's rank.
        config: The mesh and the rank.
        link: Of the table.
    """
    origin, found = dict(origins(planned_graph, local)), dict.fromkeys((n.name for n in planned_graph.graph.nodes), 0)
    for node, its_origin, sent in communications(planned_graph, local, config):
        counted_for = origin[_source(node)] if node.target is ops.all_reduce.default else its_origin
        in_bucket = _source(node).op == "placeholder"
        found[counted_for.name] += traffic_ns(sent, link, in_bucket=in_bucket)
    return found


def _source(node: fx.Node) -> fx.Node:
    """Return what a sum reads, in front of the sums over other mesh axes."""
    source = node
    while source.target is node.target:
        source = source.all_input_nodes[0]
    return source


def cheaper_whole(values: Mapping[str, Value], device: Device) -> tuple[tuple[str, str], ...]:
    """Return the nodes that are cheaper whole, by name, each with the reason.

    Args:
        values: The nodes that can be split.
        device: Of the table.
    """
    split, able = cheapest_split(values), frozenset(values) - {WHOLE}
    before, after = cost_of(values, able), cost_of(values, split)
    saved = (
        ""
        if before is None or after is None
        else f": all that is whole saves {(before - after) / 1e3:.0f} us a step against splitting it"
    )
    return tuple((name, f"cheaper whole on {device.name}{saved}") for name in values if name in able - split)


def work_ns(graph: fx.GraphModule, device: Device) -> tuple[int, int]:
    """Return how long the work of a step takes the busiest rank, and one device alone, as estimated.

    Args:
        graph: A planned graph.
        device: Of the table.
    """
    rank = alone = 0
    for node in graph.graph.nodes:
        whole = compute_ns(node, device, training=_is_trained(graph)) if node.op == "call_function" else 0
        rank += round(whole * share_of(node))
        alone += whole
    return rank, alone


def _is_trained(graph: fx.GraphModule) -> bool:
    """Return whether there is a backward."""
    captured: Captured = graph.meta[KEY]
    return captured.grad_enabled and any(captured.requires_grad)


def costs(tried: Choice, device: Device) -> dict[str, Value]:
    """Return what the nodes cost that can be split, and one for those that cannot.

    Args:
        tried: Made as if every split were worth it.
        device: Of the table.
    """
    able = [n for n in tried.graph.graph.nodes if n.op == "call_function" and _is_split(n)]
    nodes = _Able(tried, device, frozenset(n.name for n in able))
    return {WHOLE: Value(None, 0), **{node.name: nodes.value_of(node) for node in able}}


@dataclass(frozen=True)
class _Able:
    """The nodes that can be split.

    Args:
        tried: The plan in which they are.
        device: Of the table.
        names: Theirs.
    """

    tried: Choice
    device: Device
    names: frozenset[str]

    @cached_property
    def training(self) -> bool:
        """Whether there is a backward."""
        return _is_trained(self.tried.graph)

    @cached_property
    def image_dims(self) -> int:
        """How many dimensions an image has."""
        return max((tensor_value(n).ndim for n in image_inputs(self.tried.graph)), default=0)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """What each mesh axis splits."""
        return split_dims(self.tried.graph, self.tried.config)

    def value_of(self, node: fx.Node) -> Value:
        """Return what a node costs split and whole, and at its borders."""
        whole = compute_ns(node, self.device, training=self.training)
        split = round(whole * share_of(node)) + self.tried.waits_ns[node.name]
        needs = self._needs(node)
        if not _leaves_split(node):
            return Value(split, whole, needs=needs)
        gather = self._gather_ns(node) if is_tensor(node) else None  # of several values a getitem reads one
        scatter = gather if self.training and passes_gradient(node) else 0
        return Value(split, whole, gather, scatter, self._readers(node), needs)

    def _needs(self, node: fx.Node) -> tuple[str, ...]:
        """Return the nodes that have to be split for this one to be."""
        inputs = [n for n in node.all_input_nodes if n.name in self.names]
        if node.target is operator.getitem:
            return tuple(n.name for n in inputs)
        return () if self._splits_again(node) else tuple(n.name for n in inputs if _leaves_split(n))

    def _splits_again(self, node: fx.Node) -> bool:
        """Return whether a node would be split so, too, if what it reads were whole."""
        found = plan_of(node)
        if found is None or not isinstance(node.target, torch._ops.OpOverload):
            return False
        call, ranks = OpCall(node), self.tried.config.mesh_shape
        return all(splits_again(call, self.dims[axis], ranks[axis], self.image_dims) for axis in found.sharded_axes)

    def _readers(self, node: fx.Node) -> tuple[str, ...]:
        users = [u for u in node.users if not (self.tried.config.local_outputs and u.op == "output")]
        return tuple(dict.fromkeys(u.name if u.name in self.names else WHOLE for u in users))

    def _gather_ns(self, node: fx.Node) -> int:
        found, rank = plan_of(node), self.tried.config.rank
        assert found is not None
        assert rank is not None
        return gather_ns(tensor_value(node), found.outputs[0], rank.coords, self.device.link)


def _is_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and bool(found.sharded_axes)


def in_the_middle(config: Config) -> Config:
    """Return the configuration for the rank in the middle of its mesh."""
    groups = config.rank.groups if config.rank else ()
    named = (
        groups if len(groups) == len(config.mesh_shape) else tuple(f"axis{a}" for a in range(len(config.mesh_shape)))
    )
    return dataclasses.replace(config, rank=Rank(tuple(n // 2 for n in config.mesh_shape), named))


def _leaves_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and any(isinstance(p, Shard) for layout in found.outputs for p in layout)


def estimates(choice: Choice, device: Device) -> dict[str, Estimate]:
    """Return the time of each operator of a plan, and what the alternative would cost, by name.

    Args:
        choice: The plan.
        device: Of the table.

    Returns:
        Also of inputs and the output, where something is sent for them.
    """
    training, whole = _is_trained(choice.graph), {name for name, _ in choice.config.whole}
    turns = Turns(choice.values, frozenset(choice.values) - {WHOLE} - whole)
    found = {}
    for node in choice.graph.graph.nodes:
        is_operator, waits = node.op == "call_function", choice.waits_ns[node.name]
        work = compute_ns(node, device, training=training) * share_of(node) if is_operator else 0
        if is_operator or waits:
            found[node.name] = _estimate(round(work) + waits, node, choice, turns)
    return found


def _estimate(here: int, node: fx.Node, choice: Choice, turns: Turns[str]) -> Estimate:
    value = choice.values.get(node.name)
    if value is None:
        return Estimate(here / 1e3)
    turn = turns.of(node.name)
    return Estimate(
        here_us=here / 1e3,
        is_split=node.name in turns.split,
        split_us=_us(value.split),
        whole_us=_us(value.whole),
        gather_us=_us(value.gather) if value.readers else None,
        otherwise_us=None if turn is None else turn.costs / 1e3,
        with_it=0 if turn is None else turn.with_it,
    )


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3

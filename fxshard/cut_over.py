"""Which dimension is split, and which nodes every rank runs whole because that is cheaper: small late maps, mostly.

The plan that splits whatever can be split is made first; it says what each node would send.  What each node costs
split and whole, and what its value costs where the one kind reads the other, goes to :mod:`fxshard.cut`, whose
optimum is exact; the nodes that it leaves whole are planned so.

The costs are those of a rank in the middle of the mesh, on every rank: all have to decide the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard.cost import compute_ns, gather_ns, share_of, size_bytes, traffic_ns
from fxshard.cut import Value, cheapest_split, cost_of
from fxshard.emitter import Rank
from fxshard.layout import Shard
from fxshard.passes import pipeline
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.outline import copied
from fxshard.passes.plan import image_inputs, plan, split_dims
from fxshard.passes.push_splits import push_splits
from fxshard.report import Communication, describe
from fxshard.rules import find_rule
from fxshard.values import passes_gradient, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from fxshard.devices import Device
    from fxshard.passes.config import Config

WHOLE = "what is whole in any case"
"""Stands for the readers that cannot be split."""


@dataclass(frozen=True)
class Choice:
    """A plan that was tried.

    Args:
        graph: With a layout on every node.
        config: What was asked, and decided.
        step_ns: How long a step takes the busiest rank, as estimated.
    """

    graph: fx.GraphModule
    config: Config
    step_ns: int


def planned(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    device: Device | None,
    meshes: Sequence[tuple[int, ...]] = (),
) -> tuple[fx.GraphModule, Config]:
    """Return the captured graph with a layout on every node, and what was decided.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs.
        config: What is asked.
        device: Of the table; None splits whatever can be split, along the largest dimensions where none are asked for.
        meshes: The shapes that the mesh may have; none for the configuration's.
    """
    if device is None:
        return pipeline.planned(gm, example_inputs, config=config), config
    best = choices(gm, example_inputs, config=config, device=device, meshes=meshes)[0]
    return best.graph, best.config


def choices(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    device: Device,
    meshes: Sequence[tuple[int, ...]] = (),
) -> list[Choice]:
    """Return the plans that were tried, the quickest first; arguments as :func:`planned`'s."""
    captured = pipeline.captured(gm, example_inputs, config=config)
    asked = [dataclasses.replace(config, mesh_shape=shape, rank=_middle(config, shape)) for shape in meshes] or [config]
    found = [_tried(captured, tried, device) for one in asked for tried in _splits(captured, one)]
    return sorted(found, key=lambda choice: choice.step_ns)


def _splits(captured: fx.GraphModule, config: Config) -> list[Config]:
    """Return the configuration with each way to split the images: the default one first, then other dimensions."""
    default = split_dims(captured, config)
    images = image_inputs(captured)
    if config.dims is not None or config.parts or not images:
        return [config]
    shape = max((tuple(tensor_value(n).shape) for n in images), key=len)
    dims = [*range(2, len(shape)), 0]
    ways = [w for w in itertools.permutations(dims, len(config.mesh_shape)) if _fits(shape, w, config.mesh_shape)]
    return [dataclasses.replace(config, dims=way) for way in dict.fromkeys([default, *ways])]


def _fits(shape: Sequence[int], dims: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    return all(shape[dim] >= ranks for dim, ranks in zip(dims, mesh_shape, strict=True))


def _tried(captured: fx.GraphModule, config: Config, device: Device) -> Choice:
    graph = copied(captured)
    graph.meta.update(captured.meta)
    graph = pipeline.run_pass(plan, graph, config=config)
    config = dataclasses.replace(config, whole=cheaper_whole(graph, config, device))
    graph = pipeline.run_pass(push_splits, pipeline.run_pass(plan, graph, config=config), config=config)
    ns, _ = step_ns(graph, _sent(graph, config), device)
    return Choice(graph, config, ns)


def cheaper_whole(graph: fx.GraphModule, config: Config, device: Device) -> tuple[tuple[str, str], ...]:
    """Return the split nodes of a planned graph that are cheaper whole, by name, each with the reason.

    Args:
        graph: Planned as if every split were worth it.
        config: The mesh.
        device: Of the table.
    """
    values = _values(graph, config, device)
    split, able = cheapest_split(values), frozenset(values) - {WHOLE}
    before, after = cost_of(values, able), cost_of(values, split)
    saved = (
        ""
        if before is None or after is None
        else f": all that is whole saves {(before - after) / 1e3:.0f} us a step against splitting it"
    )
    return tuple((name, f"cheaper whole on {device.name}{saved}") for name in values if name in able - split)


def step_ns(graph: fx.GraphModule, sent: Mapping[str, Communication], device: Device) -> tuple[int, int]:
    """Return how long a step takes the busiest rank, and one device alone, as estimated.

    Args:
        graph: A planned graph.
        sent: What a rank sends for each node, by name.
        device: Of the table.
    """
    captured: Captured = graph.meta[KEY]
    training = captured.grad_enabled and any(captured.requires_grad)
    rank = alone = 0
    for node in graph.graph.nodes:
        whole = compute_ns(node, device, training=training) if node.op == "call_function" else 0
        rank += round(whole * share_of(node)) + traffic_ns(sent[node.name], device.link)
        alone += whole
    return rank, alone


def _values(graph: fx.GraphModule, config: Config, device: Device) -> dict[str, Value]:
    """Return the nodes that can be split, and one for those that cannot."""
    captured: Captured = graph.meta[KEY]
    training, sent = captured.grad_enabled and any(captured.requires_grad), _sent(graph, config)
    able = [n for n in graph.graph.nodes if n.op == "call_function" and _is_split(n)]
    names = {n.name for n in able}
    values: dict[str, Value] = {WHOLE: Value(None, 0)}
    for node in able:
        whole = compute_ns(node, device, training=training)
        split = round(whole * share_of(node)) + traffic_ns(sent[node.name], device.link)
        values[node.name] = Value(split, whole, **_borders(node, names, device, config, training=training))
    return values


def _is_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and bool(found.sharded_axes)


def _sent(graph: fx.GraphModule, config: Config) -> dict[str, Communication]:
    config = dataclasses.replace(config, rank=_middle(config, config.mesh_shape))
    report = describe(graph, pipeline.localized(graph, config=config), config)
    return {about.name: about.sent for about in report.nodes}


def _middle(config: Config, mesh_shape: tuple[int, ...]) -> Rank:
    """Return the rank in the middle of a mesh."""
    groups = config.rank.groups if config.rank else ()
    named = groups if len(groups) == len(mesh_shape) else tuple(f"axis{a}" for a in range(len(mesh_shape)))
    return Rank(tuple(n // 2 for n in mesh_shape), named)


def _borders(node: fx.Node, names: set[str], device: Device, config: Config, *, training: bool) -> dict[str, Any]:
    """Return what a node costs those that read it otherwise, who they are, and what it needs."""
    inputs = [n for n in node.all_input_nodes if n.name in names]
    needs = () if _enters(node) else tuple(n.name for n in inputs if _leaves_split(n))
    if node.target is operator.getitem:
        needs = tuple(n.name for n in inputs)
    if not _leaves_split(node):
        return {"needs": needs}
    users = [u for u in node.users if not (config.local_outputs and u.op == "output")]
    readers = tuple(dict.fromkeys(u.name if u.name in names else WHOLE for u in users))
    gather = gather_ns(size_bytes(node), device.link)
    is_one_of_several = any(u.target is operator.getitem for u in node.users)
    return {
        "gather": None if is_one_of_several else gather,
        "scatter": gather if training and passes_gradient(node) else 0,
        "readers": readers,
        "needs": needs,
    }


def _leaves_split(node: fx.Node) -> bool:
    found = plan_of(node)
    return found is not None and any(isinstance(p, Shard) for layout in found.outputs for p in layout)


def _enters(node: fx.Node) -> bool:
    """Return whether a node can be split although what it reads is whole."""
    found = find_rule(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    return found is not None and found.enters

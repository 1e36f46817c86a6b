"""Which dimension is split, and which nodes every rank runs whole because that is cheaper: small late maps, mostly.

The plan that splits whatever can be split is made first; it says what each node would send.  What each node costs
(:mod:`fxshard.node_costs`) goes to :mod:`fxshard.cut`, whose optimum is exact; the nodes that it leaves whole are
planned so.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxshard.candidates import mesh_shapes, splits
from fxshard.cut import Value, cheapest_split, cost_of
from fxshard.emitter import Rank
from fxshard.node_costs import WHOLE, costs
from fxshard.passes import pipeline
from fxshard.passes.outline import copied
from fxshard.passes.plan import image_inputs, split_dims
from fxshard.step_time import waits_ns, work_ns
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from fxshard.devices import Device
    from fxshard.passes.config import Config


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
        every: Whether to return also those of which the work alone takes longer than another's whole step, and those
            that split what is cheaper whole: they need less memory.
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
            split = _timed(graph, way, device)
            made = _tried(split, device)
            found += [made, dataclasses.replace(split, values=made.values)] if every and made.config.whole else [made]
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
    values = costs(split.graph, split.config, split.waits_ns, device)
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


def in_the_middle(config: Config) -> Config:
    """Return the configuration for the rank in the middle of its mesh."""
    groups = config.rank.groups if config.rank else ()
    named = (
        groups if len(groups) == len(config.mesh_shape) else tuple(f"axis{a}" for a in range(len(config.mesh_shape)))
    )
    return dataclasses.replace(config, rank=Rank(tuple(n // 2 for n in config.mesh_shape), named))

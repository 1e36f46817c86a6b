"""How long a step takes, as estimated: the work of a planned graph's nodes, and what is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxshard.cost import compute_ns, share_of, traffic_ns
from fxshard.passes.capture import KEY, Captured
from fxshard.provenance import origins
from fxshard.report import communications

if TYPE_CHECKING:
    from torch import fx

    from fxshard.devices import Device, Link
    from fxshard.passes.config import Config

ops = torch.ops.fxshard


def work_ns(graph: fx.GraphModule, device: Device) -> tuple[int, int]:
    """Return how long the work of a step takes the busiest rank, and one device alone, as estimated.

    Args:
        graph: A planned graph.
        device: Of the table.
    """
    rank = alone = 0
    for node in graph.graph.nodes:
        whole = compute_ns(node, device, training=is_trained(graph)) if node.op == "call_function" else 0
        rank += round(whole * share_of(node))
        alone += whole
    return rank, alone


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


def is_trained(graph: fx.GraphModule) -> bool:
    """Return whether a captured graph has a backward."""
    captured: Captured = graph.meta[KEY]
    return captured.is_trained

"""Wrap checkpoints: a backend that runs the graph as it is forgets and recomputes the regions itself.

Backends with a partitioner (inductor, aot_eager) read from the nodes what to recompute.  The eager backend gets::

    before                                 after
    a = conv(x)      ac_graph_id 7         checkpoint_0(x, weight)       torch.utils.checkpoint of
    b = relu(a)      ac_graph_id 7             a = conv(x); b = relu(a)      use_reentrant=False
    c = b + x                              c = checkpoint_0[0] + x

A region runs from its first node to its last, with its communication and its draws: the recomputation exchanges
again, on every rank alike, and draws again from the generator state that it had.  A region inside another is part of
the outer one.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from fxshard.emitter import RECOMPUTE_KEYS
from fxshard.passes.outline import add_module, outline

if TYPE_CHECKING:
    from fxshard.passes.config import Config

REGION = "ac_graph_id"
RUN_AS_IT_IS = ("eager", "eager_noexcept")
"""The backends that do not partition a graph into forward and backward."""


class Checkpointed(torch.nn.Module):
    """Runs a graph without keeping what its backward needs, and again in the backward.

    Args:
        region: Returns a tuple.
    """

    def __init__(self, region: fx.GraphModule) -> None:
        super().__init__()
        self.region = region

    def forward(self, *inputs: Any) -> Any:
        """Return the region's results for ``inputs``."""
        return checkpoint(self.region, *inputs, use_reentrant=False)


def wrap_checkpoints(gm: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Move every checkpointed region of a local graph into a submodule that recomputes it.

    Args:
        gm: A local graph.
        config: Names the inner backend; only one that runs the graph as it is changes anything.

    Returns:
        ``gm``.
    """
    if config.inner_backend in RUN_AS_IT_IS:
        for body in _regions(gm.graph):
            _wrap(gm, body)
    return gm


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of the outermost regions; switches of the gradient mode are marked like all else."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    spans: dict[Any, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        if REGION in node.meta:
            spans[node.meta[REGION]] = (spans.get(node.meta[REGION], (i, i))[0], i)
    found: list[list[fx.Node]] = []
    end = -1
    for first, last in sorted(spans.values(), key=lambda span: (span[0], -span[1])):
        if first > end:
            found.append(nodes[first : last + 1])
            end = last
    return found


def _wrap(gm: fx.GraphModule, body: list[fx.Node]) -> None:
    inside = set(body)
    results = [n for n in body if any(user not in inside for user in n.users)]
    outlined = outline(gm, body, results)
    name = add_module(gm, "checkpoint", Checkpointed(outlined.graph_module))
    with gm.graph.inserting_before(body[0]):
        made = gm.graph.call_module(name, outlined.captured)
        for i, node in enumerate(results):
            item = gm.graph.call_function(operator.getitem, (made, i))
            item.meta.update({k: v for k, v in node.meta.items() if k not in RECOMPUTE_KEYS})
            node.replace_all_uses_with(item, lambda user: user not in inside)
    for node in reversed(body):
        gm.graph.erase_node(node)

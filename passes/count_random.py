"""Count random: with ``rng="counter"`` draws become ``fxshard::counter``, numbers that each rank makes for its part.

Before::                          After::

    dropout(x, p)                 seed = randint(0, 2^62, [1])                once, from the default generator
    rand_like(x)                  x * counter(seed, 0, "dropout", [p], ...)
                                  counter(seed, 1, "uniform", [0, 1], ...)

What cannot be counted (``multinomial``, probabilities in a tensor, ...) stays, and so does the seed's draw:
:mod:`fxshard.passes.replace_random` makes them whole on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.counter import DRAWS as COUNTED
from fxshard.ops.memory import memory_order
from fxshard.passes.replace_random import DRAWS, Site, draws, substitute
from fxshard.rules.call import OpCall
from fxshard.values import depends_on_data, tensor_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node

    from fxshard.passes.replace_random import Results

aten = torch.ops.aten
SEEDS = 1 << 62


def count_random(gm: GraphModule) -> GraphModule:
    """Replace what can be counted.

    Args:
        gm: A functional ATen graph with global shapes; every node has a fake ``meta["val"]``.

    Returns:
        The same graph module, its graph changed.
    """
    counting = _Counting()
    for node in list(gm.graph.nodes):
        call = OpCall(node) if draws(node) and not depends_on_data(node) else None
        if call is not None and call.arguments.get("generator") is None:
            results = counting.replacement(Site(call))
            if results is not None:
                substitute(node, results)
    return gm


class _Counting:
    """Counts the draws of one graph; one seed for each device."""

    def __init__(self) -> None:
        self.seeds: dict[torch.device, Node] = {}
        self.calls = 0

    def replacement(self, site: Site) -> Results | None:
        """Return the nodes that stand for the outputs of the site's node, or None where it stays."""
        special = _SPECIAL.get(site.call.op)
        if special is not None:
            return special(self, site)
        draw = DRAWS.get(site.call.op)
        if draw is None or draw.given or draw.name not in COUNTED:
            return None
        params = [site.call[p] if isinstance(p, str) else p for p in draw.params]
        if draw.name == "random" and len(params) != 2:
            return None
        return (self.draw(site, draw.name, params, tensor_value(site.call.node)),)

    def draw(self, site: Site, name: str, params: list[float], like: torch.Tensor) -> Node:
        """Add a draw of the shape, type and memory order of ``like``."""
        if like.device not in self.seeds:
            where = {"dtype": torch.int64, "device": like.device}
            self.seeds[like.device] = site.add(aten.randint.low, 0, SEEDS, [1], **where)
        size = [int(n) for n in like.shape]
        place: tuple[Any, ...] = (size, [0] * len(size), size, list(memory_order(like)), like.dtype)
        self.calls += 1
        seed = self.seeds[like.device]
        return site.add(torch.ops.fxshard.counter.default, seed, self.calls - 1, name, params, *place)


def _dropout(counting: _Counting, site: Site) -> Results | None:
    node, p = site.call["input"], site.call["p"]
    if p in (0, 1) or tensor_value(node).numel() == 0:
        return None
    noise = counting.draw(site, "dropout", [p], tensor_value(node))
    return (site.add(aten.mul.Tensor, node, noise),)


_SPECIAL: dict[torch._ops.OpOverload, Callable[[_Counting, Site], Results | None]] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: lambda *_: None,
}

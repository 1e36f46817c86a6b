"""Expand random: a composite that draws inside is taken apart, so that its draw is an operator of its own.

Before::                                          After::

    scaled_dot_product_attention(q, k, v,         scores = q k^T, softmax over keys
                                 dropout_p)       mask = bernoulli(1 - dropout_p);  weights = scores * mask / ...
                                                  weights v

By the composite's own decomposition on the device it is for, which is what eager mode runs.  Where that is a kernel
that draws inside (flash attention) there is nothing to take apart, and :mod:`fxshard.passes.replace_random` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard._torch import is_composite
from fxshard.passes.replace_random import draws, is_known_draw
from fxshard.passes.splice import splice
from fxshard.rules import Expand, OpCall
from fxshard.values import depends_on_data

if TYPE_CHECKING:
    from torch.fx import GraphModule


def expand_random(gm: GraphModule) -> GraphModule:
    """Take the random composites apart that nobody knows how to draw.

    Args:
        gm: A functional ATen graph with global shapes; every node has a fake ``meta["val"]``.

    Returns:
        The same graph module, its graph changed.
    """
    for node in list(gm.graph.nodes):
        if draws(node) and not depends_on_data(node) and not is_known_draw(node) and is_composite(node.target):
            call = OpCall(node)
            splice(gm, call, Expand(call.op))
    return gm

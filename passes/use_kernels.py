"""Use kernels: an operator that this device has a faster kernel for becomes a call of that kernel.

Before::                                         After::

    y = conv2d(x, w, b, ..., groups=C)               y = fxshard.depthwise_conv2d(x, w, b, ...)

Which those are, and where they are faster, is :data:`fxshard.faster.KERNELS`.  The local graph is the same on all
ranks but for sizes, and so is the choice: it depends on nothing that is measured while a model is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.faster import KERNELS
from fxshard.provenance import all_nodes

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config


def use_kernels(local: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Replace operators by kernels.

    Args:
        local: A local graph.
        config: Says whether to.

    Returns:
        ``local``.
    """
    if config.kernels:
        for node in all_nodes(local):
            call = KERNELS[node.target](node) if node.target in KERNELS else None
            if call is not None:
                node.target, node.args, node.kwargs = call.target, call.args, {}
    return local

"""Use kernels: an operator that this device has a faster kernel for becomes a call of that kernel.

Before::                                         After::

    y = conv2d(x, w, b, ..., groups=C)               y = fxshard.depthwise_conv2d(x, w, b, ...)

Which those are, and where they are faster, is :data:`fxshard.faster.KERNELS`.  The local graph is the same on all
ranks but for sizes, and so is the choice on GPUs of one kind: it depends on nothing that is measured while a model is
compiled.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fxshard.faster import KERNELS
from fxshard.provenance import all_nodes

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config


log = logging.getLogger("fxshard")


def use_kernels(local: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Replace operators by kernels.

    Args:
        local: A local graph.
        config: Says whether to.

    Returns:
        ``local``.
    """
    if not config.kernels:
        return local
    calls = {node: KERNELS[node.target](node) for node in all_nodes(local) if node.target in KERNELS}
    for node, call in calls.items():
        if call is not None:
            node.target, node.args, node.kwargs = call.target, call.args, {}
    if not any(calls.values()):
        log.warning("kernels=True: this graph has no operator with a kernel that is faster on this device")
    return local

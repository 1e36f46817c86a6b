"""Lower: hand the local graph to the inner backend, communication nodes as functional collectives.

Under Inductor each ``fxshard`` operator becomes ``_c10d_functional`` calls by a decomposition that applies
after autograd: Inductor knows those as collectives and keeps their order.  Other backends run the operators
as they are.  The hash of the lowerings goes into the compile caches' key, so that cached code of another
version never runs.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch import (
    cache_key_tagged,
    dead_draws_kept,
    lookup_backend,
    recomputed_behind_collectives,
    register_inductor_decomposition,
)
from fxshard.errors import PlanError
from fxshard.meeting import digest
from fxshard.ops.lowering import LOWERINGS, lowering_hash
from fxshard.provenance import all_nodes, is_communication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from fxshard.passes.config import Config


@cache
def register_decompositions() -> None:
    """Let Inductor see what the communication operators are made of."""
    for op, lowering in LOWERINGS.items():
        register_inductor_decomposition(op, lowering)


def without_autocast() -> ExitStack:
    """Return a context without autocast: capture has made its casts explicit in the graph."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def cache_tag(local: fx.GraphModule) -> str:
    """Return what has to be in the key of compiled code's caches beside the graph's own operators.

    Those are what the communication operators are made of, and which nodes are recomputed in the backward: torch's
    caches see neither, and would run one model's code for another's that keeps less.

    Args:
        local: One rank's local graph.
    """
    regions: dict[object, int] = {}
    recomputed = [
        (node.name, regions.setdefault(node.meta.get("ac_graph_id"), len(regions)))
        for node in all_nodes(local)
        if "recompute" in node.meta
    ]
    return f"fxshard-{lowering_hash()}-{digest(recomputed)}"


def partition_rules(local: fx.GraphModule) -> AbstractContextManager[object]:
    """Return a context in which a partitioner keeps no more for the backward than it does on one device.

    Args:
        local: One rank's local graph; one without communication is partitioned as always.
    """
    return recomputed_behind_collectives() if any(map(is_communication, all_nodes(local))) else nullcontext()


def lower(local: fx.GraphModule, example_inputs: Sequence[Any], *, config: Config) -> Callable[..., Any]:
    """Compile a rewritten graph with the inner backend.

    Args:
        local: One rank's local graph.
        example_inputs: Its inputs, global.
        config: Names the inner backend.

    Returns:
        A callable with the graph's inputs and outputs.

    Raises:
        PlanError: The backend cannot be loaded.
    """
    try:
        backend = lookup_backend(config.inner_backend)
    except Exception as error:
        msg = (
            f"inner_backend={config.inner_backend!r} cannot be loaded: {type(error).__name__}: {error}; "
            "torch.compiler.list_backends() has others"
        )
        raise PlanError(msg) from error
    if config.inner_backend == "inductor":
        register_decompositions()
    ambient = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
    with without_autocast(), cache_key_tagged(cache_tag(local)), dead_draws_kept(), partition_rules(local):
        compiled = backend(local, list(example_inputs))
    if not ambient:
        return compiled

    def run(*inputs: Any) -> Any:
        with without_autocast():
            return compiled(*inputs)

    return run

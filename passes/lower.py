"""Lower: hand the local graph to the inner backend, communication nodes as functional collectives.

Under Inductor each ``fxshard`` operator becomes ``_c10d_functional`` calls by a decomposition that applies
after autograd: Inductor knows those as collectives and keeps their order.  Other backends run the operators
as they are.  The hash of the lowerings goes into the compile caches' key, so that cached code of another
version never runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import (
    cache_key_tagged,
    dead_draws_kept,
    lookup_backend,
    memory_budget,
    mode_options,
    recomputed_behind_collectives,
    register_inductor_decomposition,
)
from fxshard.assembler import use_sound_assembler
from fxshard.errors import PlanError
from fxshard.meeting import digest
from fxshard.ops.lowering import LOWERINGS, lowering_hash
from fxshard.provenance import all_nodes, is_communication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def cache_tag(local: fx.GraphModule, assembler: str) -> str:
    """Return what has to be in the key of compiled code's caches beside the graph's own operators.

    Those are what the communication operators are made of, and which nodes are recomputed in the backward: torch's
    caches see neither, and would run one model's code for another's that keeps less.

    Args:
        local: One rank's local graph.
        assembler: What :func:`fxshard.assembler.use_sound_assembler` returned.
    """
    regions: dict[object, int] = {}
    recomputed = [
        (node.name, regions.setdefault(node.meta.get("ac_graph_id"), len(regions)))
        for node in all_nodes(local)
        if "recompute" in node.meta
    ]
    return f"fxshard-{lowering_hash()}-{digest([*recomputed, assembler])}"


def partition_rules(local: fx.GraphModule, config: Config) -> ExitStack:
    """Return a context in which a partitioner keeps no more for the backward than it does on one device.

    With a budget it keeps less, but never communicates or draws again, unless a checkpoint of the model's says so:
    ranks of other sizes may be left with other values.

    Args:
        local: One rank's local graph, which is marked; one without communication is partitioned as always.
        config: Has the budget.
    """
    stack = ExitStack()
    if any(map(is_communication, all_nodes(local))):
        stack.enter_context(recomputed_behind_collectives())
    if config.memory_budget < 1:
        stack.enter_context(memory_budget(config.memory_budget))
        for node in all_nodes(local):
            if getattr(node.target, "namespace", "") == "fxshard":
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return stack


def inner_compiler(config: Config) -> Callable[..., Any]:
    """Return the inner backend, in its mode.

    Args:
        config: Names both.

    Raises:
        PlanError: The backend cannot be loaded.
    """
    try:
        backend: Callable[..., Any] = lookup_backend(config.inner_backend)
    except Exception as error:
        msg = (
            f"inner_backend={config.inner_backend!r} cannot be loaded: {type(error).__name__}: {error}; "
            "torch.compiler.list_backends() has others"
        )
        raise PlanError(msg) from error
    options = mode_options(config.mode)
    return partial(backend, config_patches=options) if options else backend


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
    backend = inner_compiler(config)
    devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor) and value.is_cuda}
    assembler = "".join(sorted({use_sound_assembler(device) for device in devices}))
    if config.inner_backend == "inductor":
        register_decompositions()
    ambient = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
    with (
        without_autocast(),
        cache_key_tagged(cache_tag(local, assembler)),
        dead_draws_kept(),
        partition_rules(local, config),
    ):
        compiled: Callable[..., Any] = backend(local, list(example_inputs))
    if not ambient:
        return compiled

    def run(*inputs: Any) -> Any:
        with without_autocast():
            return compiled(*inputs)

    return run

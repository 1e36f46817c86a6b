"""Dynamo: the graphs that it hands over, and how it captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import graph_break_reasons

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from traceback import FrameSummary


def is_module_state(placeholder: torch.fx.Node, example: object) -> bool:
    """Return whether a Dynamo graph's placeholder is a parameter or buffer of a module.

    Dynamo names the origin of each placeholder in ``_dynamo_source``; a source that was reached through an
    ``nn.Module`` has a guard source that says so.

    Args:
        placeholder: A placeholder of the graph that Dynamo hands to a backend.
        example: Its example input.
    """
    if isinstance(example, torch.nn.Parameter):
        return True
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return False
    guard_source = source.guard_source
    kind = guard_source() if callable(guard_source) else guard_source  # a method in 2.11, a property in 2.14
    return bool(kind.is_unspecialized_nn_module() or kind.is_unspecialized_builtin_nn_module())


SOURCE = "_dynamo_source"
"""Where a placeholder of Dynamo's has its place in the user's program."""
_SOURCES = "_param_name_to_source"


def hand_on(gm: torch.fx.GraphModule, made: torch.fx.GraphModule) -> None:
    """Let AOTAutograd see of a graph that was made from Dynamo's which inputs are the model's, and stay in their place.

    CUDA graphs copy any other input at each call, and Inductor looks at where it begins.

    Args:
        gm: What Dynamo hands to a backend.
        made: Has the same inputs; is given what is known of them.
    """
    made.meta.update(gm.meta)
    if hasattr(gm, _SOURCES):
        own = (*made.named_parameters(remove_duplicate=False), *made.named_buffers(remove_duplicate=False))
        constants = {name: ConstantSource(f"fxshard {name}") for name, _ in own}
        setattr(made, _SOURCES, {**getattr(gm, _SOURCES), **constants})
    theirs, ours = (graph.graph.find_nodes(op="placeholder") for graph in (gm, made))
    for node, origin in zip(ours, theirs, strict=True):
        setattr(node, SOURCE, getattr(origin, SOURCE, None))
        node.meta["tensor_dict"] = origin.meta.get("tensor_dict", {})


MOST_GRAPHS = 64
"""How many graphs of one function are kept: one for each input size, mode and set of frozen parameters."""


def whole_graphs() -> AbstractContextManager[None]:
    """Return a context in which a model is captured whole, for each size that it meets.

    Dynamo otherwise cuts the graph of a model inside DistributedDataParallel at the buckets before a backend sees
    it, and each piece would be gathered; and it leaves recurrent layers out.
    """
    return _patched(optimize_ddp=False, allow_rnn=True)


def static_shapes() -> AbstractContextManager[None]:
    """Return a context in which Dynamo captures each size and number as it is, as ``dynamic=False`` has it do.

    It otherwise makes symbols of them at the second size.
    """
    return _patched(automatic_dynamic_shapes=False, assume_static_by_default=True)


def _patched(**options: bool) -> AbstractContextManager[None]:
    """Return a context in which Dynamo compiles a function anew for all that a plan depends on.

    It otherwise gives up at the ninth graph of a function, which then runs as it is; and in 2.11 it does not look at
    a parameter that is frozen or thawed in place, whose gradient has to be summed or not.
    """
    from torch._dynamo import config  # noqa: PLC0415  a submodule of its own

    limit = max(config.recompile_limit, MOST_GRAPHS)
    patched: AbstractContextManager[None] = config.patch(
        {"recompile_limit": limit, "skip_tensor_guards_with_matching_dict_tags": False, **options}
    )
    return patched


class End(NamedTuple):
    """Where a graph ends, and why.

    Args:
        reason: Dynamo's words.
        stack: The user's frames, the innermost last.
        is_break: Whether the function goes on after it.
    """

    reason: str
    stack: Sequence[FrameSummary]
    is_break: bool


def graph_end(gm: torch.fx.GraphModule) -> End | None:
    """Return where a graph ends; None where Dynamo does not say.

    Args:
        gm: What Dynamo hands to a backend.
    """
    found = getattr(gm, "compile_subgraph_reason", None)
    return None if found is None else End(found.reason, found.user_stack, found.graph_break)


def breaks_so_far() -> list[End]:
    """Return the breaks of this process, also those before which nothing was captured."""
    return [End(found.reason, found.user_stack, is_break=True) for found in graph_break_reasons]


def compilation_number(gm: torch.fx.GraphModule) -> int:
    """Return which graph of its function this is, from 1; 0 where Dynamo does not say.

    Args:
        gm: What Dynamo hands to a backend.
    """
    found = getattr(gm.meta.get("dynamo_compile_id"), "frame_compile_id", None)
    return 0 if found is None else int(found) + 1

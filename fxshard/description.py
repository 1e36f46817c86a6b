"""What a rank says of a graph that it is about to compile, and to run: what has to be equal on all ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fxshard import compared
from fxshard.digests import collectives_digest, generator_digest, graph_digest, values_digest
from fxshard.meeting import digest
from fxshard.ops.memory import memory_order
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.config import Config
from fxshard.passes.replace_random import has_random
from fxshard.program import input_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx
    from torch.distributed.device_mesh import DeviceMesh

OPTIONS = {field.name: f"option {field.name}" for field in dataclasses.fields(Config) if field.name != "rank"}
"""What the fields of the configuration are called; whose graph it is differs."""
RUNS = (
    *OPTIONS.values(),
    *("input shapes", "input types", "need a gradient", "captured graph", "sequence of collectives"),
)
"""What is compared at each call; the rest was when the graph was compiled."""
MOST_NAMES = 8
"""How many parameters a rank names."""


def describe_graph(
    graph: fx.GraphModule, local: fx.GraphModule, example_inputs: Sequence[Any], config: Config, mesh: DeviceMesh
) -> dict[str, str]:
    """Return what has to be equal on all ranks, a name and a value for each thing.

    Args:
        graph: The planned global graph.
        local: This rank's.
        example_inputs: Of the global graph.
        config: What was asked for.
        mesh: Whose ranks are compared.
    """
    captured: Captured = graph.meta[KEY]
    given = [v for v, state in zip(example_inputs, captured.is_state, strict=True) if not state]
    state = [v for v, is_state in zip(example_inputs, captured.is_state, strict=True) if is_state]
    known = bool(state) and compared.were_compared(mesh, state)
    return {
        **{name: str(getattr(config, field)) for field, name in OPTIONS.items()},
        "input shapes": str([tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in given]),
        "input types": ", ".join(map(_type, given)),
        "need a gradient": _with_gradient(graph, captured, example_inputs),
        "captured graph": graph_digest(graph),
        "parameter and buffer values": f"compared before: {compared.identities(mesh, state)}"
        if known
        else values_digest(state),
        "memory formats": digest(_memory_orders(captured, example_inputs, config)),
        "input values": "not compared again" if known else values_digest(given),
        "sequence of collectives": collectives_digest(local),
        "generator state": generator_digest() if has_random(graph) else "not used",
        "torch": torch.__version__,
    }


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} on {value.device.type}"
    return type(value).__name__


def _with_gradient(graph: fx.GraphModule, captured: Captured, example_inputs: Sequence[Any]) -> str:
    """Return the names of the parameters and inputs that need a gradient, or of those that do not, the shorter list."""
    inputs = graph.graph.find_nodes(op="placeholder")
    wanted, others = [], []
    for node, value, needed, state in zip(
        inputs, example_inputs, captured.requires_grad, captured.is_state, strict=True
    ):
        if needed:
            wanted.append(input_name(node) or node.name)
        elif isinstance(value, torch.nn.Parameter) or (not state and _is_floating(value)):  # no buffer, no label
            others.append(input_name(node) or node.name)
    if not captured.grad_enabled or not wanted:
        return "nothing"
    if not others:
        return "everything"
    return _listed(wanted) if len(wanted) <= len(others) else f"all but {_listed(others)}"


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)}, {digest(names)})" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _memory_orders(captured: Captured, example_inputs: Sequence[Any], config: Config) -> list[tuple[int, ...]]:
    """Return the memory order of whatever is trained, in which gradients travel, and of buffers."""
    parts = {number for number, _ in config.parts}
    return [
        memory_order(value)
        for number, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor)
        and number not in parts
        and (captured.is_state[number] or captured.requires_grad[number])
    ]

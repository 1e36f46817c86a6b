"""What a plan does, node by node, and what one rank sends for it in a training step.

The planned graph says where every value lives and why something is gathered; the local graph says what is
sent.  Communication is counted from the arguments of the communication operators (:mod:`fxshard.ops.traffic`),
forward and, where a gradient passes, backward::

    in the forward     counted forward as    and backward as
    halo_exchange      halo                  halo       gradients of the borders go home
    all_gather         gather                -          each rank takes its slice of the gradient
    slice              -                     gather     the slices of the gradient are put together
    redistribute       redistribute          redistribute
    all_reduce         reduce                -          statistics: the sum's gradient is the same everywhere
    sum_gradient       -                     gradient   each rank's gradient is one term of the sum; those of
                                                        parameters travel in buckets

An all-reduce counts its payload once, whatever the algorithm sends.  What activation checkpointing runs a second
time is counted once.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from fxshard._torch import set_grad_enabled
from fxshard.ops.traffic import Traffic, node_traffic, traffic
from fxshard.passes.bucket_gradients import bucket_bytes, gradient_buckets
from fxshard.passes.capture import KEY, Captured
from fxshard.provenance import is_communication, module_path, origins, source_line
from fxshard.values import passes_gradient, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from fxshard.passes.config import Config

ops = torch.ops.fxshard
VERSION = 1
"""Of the JSON form; a field that changes its meaning raises it."""

_FORWARD = {
    ops.halo_exchange.default: "halo",
    ops.all_gather.default: "gather",
    ops.redistribute.default: "redistribute",
    ops.all_reduce.default: "reduce",
}
_BACKWARD = {
    ops.halo_exchange.default: "halo",
    ops.slice.default: "gather",
    ops.redistribute.default: "redistribute",
    ops.sum_gradient.default: "gradient",
}
_PARTNERS = {
    ops.halo_exchange.default: ops.halo_accumulate.default,
    ops.slice.default: ops.all_gather.default,
    ops.redistribute.default: ops.redistribute.default,
    ops.sum_gradient.default: ops.all_reduce.default,
}
KINDS = ("halo", "gather", "redistribute", "reduce", "gradient")
"""The kinds of communication, in the order they are listed."""


@dataclass(frozen=True)
class Communication:
    """What one rank sends in a training step.

    Args:
        forward: By kind, in the forward.
        backward: By kind, in the backward.
    """

    forward: dict[str, Traffic] = field(default_factory=dict)
    backward: dict[str, Traffic] = field(default_factory=dict)

    def __add__(self, other: Communication) -> Communication:
        return Communication(_merge(self.forward, other.forward), _merge(self.backward, other.backward))

    def of(self, *kinds: str) -> Traffic:
        """Return what is sent for ``kinds``, forward and backward; for all kinds when none is named."""
        found = [t for part in (self.forward, self.backward) for kind, t in part.items() if not kinds or kind in kinds]
        return sum(found, Traffic())


@dataclass(frozen=True)
class Estimate:
    """How long a rank takes for a node in a step, and what the alternative would cost: estimates, in microseconds.

    Args:
        here_us: As planned: its work, and waiting for what is sent for it.
        is_split: Whether it is split, as planned.
        split_us: The same where the node is split; None where it cannot be.
        whole_us: Its work where every rank runs it whole; None where it cannot be split.
        gather_us: To put its value together, once, where it is split and read whole; None where it is not split.
        otherwise_us: How much longer a step would be with the node the other way, whole or split, with what is gathered
            then or no more; None where there is no other way.
        with_it: How many other nodes would have to be the other way, too.
    """

    here_us: float
    is_split: bool = False
    split_us: float | None = None
    whole_us: float | None = None
    gather_us: float | None = None
    otherwise_us: float | None = None
    with_it: int = 0


@dataclass(frozen=True)
class NodeReport:
    """One node of the planned graph.

    Of a node of the rank's own graph, ``shape``, ``dtype`` and ``layout`` are those of the planned node that it makes,
    and missing where it makes a part of it only; ``local_shape`` is its own.

    Args:
        name: Its name in the graph.
        op: ``"placeholder"``, ``"output"`` or the operator.
        shape: The global shape of its (first) tensor, None where it has none; -1 is a size that only the data tells.
        dtype: Of that tensor, such as ``"float32"``; empty where there is none.
        layout: Where that tensor lives: one placement for each mesh axis.
        local_shape: What this rank holds of it.
        reason: Why something is gathered here, or an input not split; empty where it is as asked.
        module: The module that runs it, as ``named_modules`` names it.
        source: The user's line.
        sent: What this rank sends for it.
        inputs: The nodes that it reads.
        is_state: Whether it is a parameter or a buffer of the model.
        estimate: Of its time; None where the plan is for no device.
    """

    name: str
    op: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    layout: str = ""
    local_shape: tuple[int, ...] | None = None
    reason: str = ""
    module: str = ""
    source: str = ""
    sent: Communication = field(default_factory=Communication)
    inputs: tuple[str, ...] = ()
    is_state: bool = False
    estimate: Estimate | None = None


@dataclass(frozen=True)
class PlanReport:
    """A plan and its communication, as one rank sees it.

    Args:
        mesh_shape: Ranks on each mesh axis.
        coords: Which rank.
        nodes: In program order.
        stage: Whose nodes they are: ``"global"`` the planned graph's, ``"local"`` those it was rewritten to.
        updates: The nodes that make the new value of a buffer, which a planned graph returns beside the results.
    """

    mesh_shape: tuple[int, ...]
    coords: tuple[int, ...]
    nodes: tuple[NodeReport, ...]
    stage: str = "global"
    updates: tuple[str, ...] = ()

    @property
    def total(self) -> Communication:
        """What this rank sends in a training step."""
        return sum((node.sent for node in self.nodes), Communication())

    @property
    def reasons(self) -> dict[str, int]:
        """Why something is gathered or not split, and at how many nodes."""
        return dict(Counter(node.reason for node in self.nodes if node.reason))

    def to_json(self) -> str:
        """Return the report as JSON; ``docs/plan.schema.json`` says what is where."""
        table = {
            "version": VERSION,
            **dataclasses.asdict(self),
            "reasons": self.reasons,
            "total": dataclasses.asdict(self.total),
        }
        return json.dumps(table, indent=1)

    def __str__(self) -> str:
        lines = [f"rank {self.coords} of mesh {self.mesh_shape}: {len(self.nodes)} nodes"]
        for name, part in (("forward", self.total.forward), ("backward", self.total.backward)):
            sent = {k: part[k] for k in KINDS if k in part}
            lines += [f"{name:<9}{k:<13}{t.messages:>5} {t.noun:<8} {t.bytes:>13,} bytes" for k, t in sent.items()]
        lines += [f"gathered or not split at {count} nodes: {reason}" for reason, count in self.reasons.items()]
        return "\n".join(lines)


def describe(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> PlanReport:
    """Return what a plan does and what ``config.rank`` sends for it.

    Args:
        planned: The global graph with a layout on every node.
        local: What it was rewritten to for the rank.
        config: The mesh and the rank.

    Example:
        >>> from fxshard import backend
        >>> backend.on_compiled.append(lambda *graphs: print(describe(*graphs)))  # doctest: +SKIP
    """
    assert config.rank is not None, "a local graph is one rank's"
    coords = config.rank.coords
    sent: dict[fx.Node, Communication] = {}
    for _, origin, its in communications(planned, local, config):
        sent[origin] = sent.get(origin, Communication()) + its
    state = _state(planned, planned)
    nodes = tuple(
        dataclasses.replace(_describe_node(node, coords), sent=sent.get(node, Communication()), is_state=node in state)
        for node in planned.graph.nodes
    )
    captured: Captured = planned.meta[KEY]
    returned = planned.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    updates = tuple(str(node) for node in returned[: len(captured.updates)])
    return PlanReport(config.mesh_shape, coords, nodes, updates=updates)


def describe_local(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> PlanReport:
    """Return what the graph of ``config.rank`` does, node by node; arguments as :func:`describe`'s."""
    assert config.rank is not None, "a local graph is one rank's"
    coords = config.rank.coords
    sent = {node: its for node, _, its in communications(planned, local, config)}
    state = _state(planned, local)
    nodes = tuple(
        dataclasses.replace(
            _describe_local_node(node, origin, coords), sent=sent.get(node, Communication()), is_state=node in state
        )
        for node, origin in origins(planned, local)
    )
    return PlanReport(config.mesh_shape, coords, nodes, "local")


def _describe_local_node(node: fx.Node, origin: fx.Node, coords: tuple[int, ...]) -> NodeReport:
    whole, value = _describe_node(origin, coords), _first_tensor(node)
    shape = None if value is None else _known(value.shape)
    makes_it = shape is not None and shape == whole.local_shape and not is_communication(node)
    return NodeReport(
        name=node.name,
        op=_op_name(node),
        shape=whole.shape if makes_it else None,
        dtype="" if value is None else _dtype(value),
        layout=whole.layout if makes_it else "",
        local_shape=shape,
        reason=whole.reason if is_communication(node) or node.op == "placeholder" else "",
        module=whole.module,
        source=whole.source,
        inputs=tuple(n.name for n in node.all_input_nodes),
    )


def _state(planned: fx.GraphModule, gm: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs of ``gm``, the planned graph or its local one, that are parameters or buffers."""
    captured: Captured = planned.meta[KEY]
    return {n for n, it_is in zip(gm.graph.find_nodes(op="placeholder"), captured.is_state, strict=True) if it_is}


def _describe_node(node: fx.Node, coords: tuple[int, ...]) -> NodeReport:
    plan, value = plan_of(node), _first_tensor(node)
    about = NodeReport(
        name=node.name,
        op=_op_name(node),
        reason=plan.reason if plan else "",
        module=module_path(node),
        source=source_line(node),
        inputs=tuple(n.name for n in node.all_input_nodes),
    )
    if plan is None or value is None or not plan.outputs:
        return about
    layout = plan.outputs[0]
    return dataclasses.replace(
        about,
        shape=_known(value.shape),
        dtype=_dtype(value),
        layout=str(layout),
        local_shape=_known(layout.local_shape(value.shape, coords)),
    )


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _known(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape with -1 for sizes that only the data tells."""
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def _op_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return (
        str(node.target) if isinstance(node.target, OpOverload) else str(getattr(node.target, "__name__", node.target))
    )


def _first_tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def _merge(a: dict[str, Traffic], b: dict[str, Traffic]) -> dict[str, Traffic]:
    return {kind: a.get(kind, Traffic()) + b.get(kind, Traffic()) for kind in KINDS if kind in a or kind in b}


def communications(
    planned: fx.GraphModule, local: fx.GraphModule, config: Config
) -> Iterator[tuple[fx.Node, fx.Node, Communication]]:
    """Yield the local nodes that communicate, each with its planned node and with what is sent.

    Args:
        planned: The global graph.
        local: That of ``config.rank``.
        config: The mesh and the rank.
    """
    with_gradient, bucketed = _with_gradient(planned, local), _bucketed(local, config)
    for node, origin in origins(planned, local):
        if node in bucketed:
            yield node, origin, Communication({}, {"gradient": bucketed[node]})
        elif is_communication(node):
            yield node, origin, _communication(node, node in with_gradient)


def _bucketed(local: fx.GraphModule, config: Config) -> dict[fx.Node, Traffic]:
    """Return what is sent for each gradient sum that is in a bucket: the message goes to the last that is ready."""
    found = {}
    for members in gradient_buckets(local.graph, config):
        for member in members:
            sent = Traffic(int(member is members[-1]), bucket_bytes([member], config))
            found.update(dict.fromkeys(member.sums, Traffic()) | {member.sums[0]: sent})
    return found


def _communication(node: fx.Node, has_gradient: bool) -> Communication:
    forward = {_FORWARD[node.target]: node_traffic(node)} if node.target in _FORWARD else {}
    backward = {_BACKWARD[node.target]: _backward_traffic(node)} if has_gradient and node.target in _BACKWARD else {}
    return Communication(forward, backward)


def _backward_traffic(node: fx.Node) -> Traffic:
    """Return what the backward of a communication node sends, whose gradient has the shape of the node's value."""
    args: list[Any] = list(node.args[1:])
    if node.target is ops.redistribute.default:
        args[:4] = args[2:4] + args[:2]
    assert isinstance(node.target, OpOverload)
    value = tensor_value(node)
    return traffic(_PARTNERS[node.target], args, value.shape, value.element_size())


def _with_gradient(planned: fx.GraphModule, local: fx.GraphModule) -> set[fx.Node]:
    """Return the local nodes that a gradient passes."""
    captured: Captured = planned.meta[KEY]
    needs_grad = iter(captured.requires_grad)
    found, enabled = set(), captured.grad_enabled
    for node in local.graph.nodes:
        if node.op == "placeholder":
            passes = next(needs_grad) and enabled
        else:
            if node.target is set_grad_enabled:
                enabled = bool(node.args[0])
            passes = enabled and passes_gradient(node) and any(n in found for n in node.all_input_nodes)
        if passes:
            found.add(node)
    return found

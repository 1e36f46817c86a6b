"""Bisection: the first node of a sharded graph whose value or gradient is not the untouched model's.

On every rank the same step is run four times, from the same seed and cotangents (:mod:`fxshard.replay`)::

    source     Dynamo's graph: the model's own operators, on one device
    planned    the captured graph with what rules expand, on one device     CAPTURED: is it the source?
    local      this rank's graph                                            SPLIT:    are it the planned graph's parts?
    compiled   what the inner backend made of it                            COMPILED: is it the planned graph?

A value of the source has a node that stands for it in the planned graph, and that its parts in the local graph::

    planned node   value          gradient
    layout S(d)    slice          slice of the whole's gradient
    layout R       whole          whole
    layout P(sum)  -              whole, on each rank

The value that differs first in program order is where something else is computed; with all values right, the
gradient that differs last in program order is where the backward first goes wrong, which runs from the end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard import backend
from fxshard.compare import VANISHING_SCALE, transformed
from fxshard.layout import Layout, Partial, Shard
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.hoist_sums import TERM
from fxshard.passes.pipeline import run_pass
from fxshard.passes.rewrite import VALUES
from fxshard.passes.wrap_gradients import wrap_gradients
from fxshard.program import input_name
from fxshard.provenance import module_path, source_line
from fxshard.replay import Ran, leaves_of, run_graph, train
from fxshard.trace import Case, build_model
from fxshard.values import is_tensor, plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fxshard.passes.config import Config

TOLERANCE = 1e-9
KINDS = ("value", "buffer", "gradient")
"""What may differ, the first first."""


class Between(Enum):
    """Which two of the graphs differ."""

    CAPTURED = "the model, and what it was captured and spelled out as (both on one device)"
    SPLIT = "one device, and this rank's part"
    COMPILED = "one device, and this rank's part as the inner backend compiled it"


@dataclass(frozen=True)
class Culprit:
    """The first difference, as one rank sees it.

    Args:
        node: Its name in the global graph.
        op: Its operator.
        kind: ``"value"``, ``"gradient"`` or ``"buffer"``.
        error: Largest difference, relative to the largest magnitude.
        layout: How the plan places it.
        inputs: In which layouts the operator gets its inputs.
        module: The module that runs it.
        source: The user's line.
        expected: Statistics of the untouched model's value, at this rank's part.
        found: Statistics of what the rank has.
        between: Which graphs differ.
        users: Of a gradient: who uses the value, ``node (operator) at line``; it comes from the backward of these.
        order: Sorts the culprits of several ranks; the first one is the cause.
    """

    node: str
    op: str
    kind: str
    error: float
    layout: str
    inputs: tuple[str, ...]
    module: str
    source: str
    expected: str
    found: str
    between: str
    users: tuple[str, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.module, self.source and f"at {self.source}")))
        return "\n".join(
            [
                f"the {self.kind} of {self.node} ({self.op}) differs by {self.error:.1e}",
                f"    {where or 'no line of the model is known'}",
                *(f"    comes from the backward of {user}" for user in self.users),
                f"    layout {self.layout}, inputs {', '.join(self.inputs) or 'none'}",
                f"    between    {self.between}",
                f"    untouched  {self.expected}",
                f"    sharded    {self.found}",
            ]
        )


def first_of(culprits: Sequence[Culprit | None]) -> Culprit | None:
    """Return the one that is the cause of the others: what a rank computes wrongly, its neighbours get later.

    Args:
        culprits: What each rank found.
    """
    return min(filter(None, culprits), key=lambda culprit: culprit.order, default=None)


def bisect_on_rank(rank: int, case: Case) -> Culprit | None:
    """Return the first difference on this rank, or None (runs in every rank process of the case's mesh).

    Args:
        rank: Not used: every rank looks at its own part.
        case: What to build, and how it is transformed.
    """
    del rank
    torch.compiler.reset()
    found: list[Culprit | None] = []

    def look(compiled: backend.Compiled, inputs: Sequence[Any]) -> None:
        found.append(_first_difference(compiled, inputs))

    backend.on_first_call.append(look)
    try:
        model, inputs = build_model(case)
        sharded = transformed(model, case)
        sharded(**inputs) if isinstance(inputs, dict) else sharded(*inputs)
    finally:
        backend.on_first_call.remove(look)
    return next((culprit for culprit in found if culprit is not None), None)


def _first_difference(compiled: backend.Compiled, feed: Sequence[Any]) -> Culprit | None:
    """Run everything, which every rank has to, and then compare."""
    captured: Captured = compiled.planned.meta[KEY]
    planned = run_pass(wrap_gradients, compiled.planned)
    updates = len(captured.updates)
    own = run_graph(compiled.source, feed, captured)
    whole = run_graph(planned, feed, captured, updates)
    parts = run_graph(compiled.local, feed, captured)
    made = Ran(leaves_of(feed, captured))
    train(compiled.run, made, captured)
    same_draws = compiled.config.rng == "match"
    return (
        (_captured_otherwise(compiled.source, planned, own, whole) if same_draws else None)
        or _split_otherwise(compiled, planned, whole, parts)
        or (None if compiled.config.local_outputs else _compiled_otherwise(planned, whole, made, updates))
    )


def _largest(ran: Ran) -> float:
    found = [g for g in ran.gradients.values() if g is not None and g.numel()]
    return max((float(g.abs().max()) for g in found), default=0.0)


def _captured_otherwise(source: fx.GraphModule, planned: fx.GraphModule, own: Ran, whole: Ran) -> Culprit | None:
    """Compare the model's own operators with the planned graph, run whole."""
    between = Between.CAPTURED
    pairs = [(a.name, b) for a, b in _counterparts(source, planned)]
    for name, node in pairs:
        if name in own.values and node.name in whole.values:
            culprit = _compared(node, "value", own.values[name], whole.values[node.name], 0.0, between)
            if culprit:
                return culprit
    captured: Captured = planned.meta[KEY]
    output = next(n for n in planned.graph.nodes if n.op == "output")
    for position, node, value in zip(captured.updates, output.args[0], whole.outputs, strict=False):
        culprit = _compared(node, "buffer", own.leaves[position].detach(), value.detach(), 0.0, between)
        if culprit:
            return culprit
    largest = _largest(own)
    for name, node in reversed(pairs):
        expected, found = own.gradients.get(name), whole.gradients.get(node.name)
        if expected is not None and node.name in whole.gradients:
            found = torch.zeros_like(expected) if found is None else found
            culprit = _compared(node, "gradient", expected, found, largest, between)
            if culprit:
                return culprit
    return None


def _counterparts(source: fx.GraphModule, planned: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield nodes of Dynamo's graph with the node that stands for them in the planned graph."""
    made: dict[str, list[fx.Node]] = defaultdict(list)
    for node in planned.graph.nodes:
        if node.op == "call_function" and is_tensor(node) and _model_node(node):
            made[_model_node(node)].append(node)
    inputs = [graph.graph.find_nodes(op="placeholder") for graph in (source, planned)]
    yield from ((theirs, ours) for theirs, ours in zip(*inputs, strict=True) if is_tensor(ours))
    for node in source.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and node.op not in ("placeholder", "output"):
            wanted = (value.shape, value.dtype)
            name = _model_node(node)  # when it was made: Dynamo renames it
            alike = [n for n in made[name] if (n.meta["val"].shape, n.meta["val"].dtype) == wanted]
            results = [n for n in alike if any(_model_node(user) != name for user in n.users)]
            if results:
                yield node, results[-1]


def _model_node(node: fx.Node) -> str:
    """Return the name that the node of Dynamo's graph had that ``node`` was captured from; none inside of a region."""
    stack = node.meta.get("source_fn_stack") or []
    return str(stack[0][0]) if len(stack) == 1 else ""


def _split_otherwise(compiled: backend.Compiled, planned: fx.GraphModule, whole: Ran, parts: Ran) -> Culprit | None:
    """Compare the planned graph, run whole, with the parts of it that this rank has."""
    local, config = compiled.local, compiled.config
    assert config.rank is not None
    pairs = []
    for node in planned.graph.nodes:
        name, plan = local.meta[VALUES].get(node.name), plan_of(node)
        made = node.name in whole.values and name in parts.values
        if node.op != "output" and is_tensor(node) and made and plan is not None:
            pairs.append((node, name, plan.outputs[0]))
    for node, name, layout in pairs:
        if node.op == "call_function" and not any(isinstance(p, Partial) for p in layout):
            expected = _own(whole.values[node.name], layout, config)
            culprit = _compared(node, "value", expected, parts.values[name], 0.0, Between.SPLIT)
            if culprit:
                return culprit
    terms = {n.name for n in local.graph.nodes if TERM in n.meta}  # compared where they are summed: at the input
    largest = _largest(whole)
    for node, name, layout in reversed(pairs):
        gradient = whole.gradients.get(node.name)
        if gradient is not None and name not in terms:
            found = parts.gradients.get(name)
            found = torch.zeros_like(parts.values[name]) if found is None else found
            expected = _own(gradient, layout, config)
            culprit = _compared(node, "gradient", expected, found, largest, Between.SPLIT)
            if culprit:
                return culprit
    return None


def _compiled_otherwise(planned: fx.GraphModule, whole: Ran, made: Ran, updates: int) -> Culprit | None:
    """Compare outputs and gradients of the inputs with those of what the inner backend made."""
    output = next(n for n in planned.graph.nodes if n.op == "output")
    for node, expected, found in zip(output.args[0][updates:], whole.outputs[updates:], made.outputs, strict=True):
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor) and isinstance(node, fx.Node):
            culprit = _compared(node, "value", expected.detach(), found.detach(), 0.0, Between.COMPILED)
            if culprit:
                return culprit
    largest = _largest(whole)
    inputs = [n for n in planned.graph.nodes if n.op == "placeholder"]
    for node, leaf in zip(inputs, made.leaves, strict=True):
        gradient = whole.gradients.get(node.name)
        if gradient is not None:
            found = torch.zeros_like(gradient) if leaf.grad is None else leaf.grad
            culprit = _compared(node, "gradient", gradient, found, largest, Between.COMPILED)
            if culprit:
                return culprit
    return None


def _own(value: Tensor, layout: Layout, config: Config) -> Tensor:
    """Return this rank's part of a whole value."""
    assert config.rank is not None
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            lo, hi = placement.interval(config.rank.coords[axis])
            outer = value.shape[placement.dim] // placement.size
            shape = (*value.shape[: placement.dim], outer, placement.size, *value.shape[placement.dim + 1 :])
            cut = value.reshape(shape).narrow(placement.dim + 1, lo, hi - lo)
            value = cut.flatten(placement.dim, placement.dim + 1)
    return value


def _compared(
    node: fx.Node, kind: str, expected: Tensor, found: Tensor, largest: float, between: Between
) -> Culprit | None:
    same_shape = expected.shape == found.shape
    error = _error(expected, found, largest) if same_shape else float("inf")
    plan = plan_of(node)
    if error <= TOLERANCE or plan is None:
        return None
    position = list(node.graph.nodes).index(node)
    where = next(iter(node.users), node) if node.op == "placeholder" else node  # a parameter: where it is used
    return Culprit(
        node=node.name,
        op=str(node.target) if node.op == "call_function" else f"input {input_name(node)}",
        kind=kind,
        error=error,
        layout=str(plan.outputs[0]),
        inputs=tuple(map(str, plan.inputs)),
        module=module_path(where),
        source=source_line(where),
        expected=_statistics(expected),
        found=_statistics(found),
        between=between.value,
        users=tuple(map(_described, node.users)) if kind == "gradient" else (),
        order=(list(Between).index(between), KINDS.index(kind), -position if kind == "gradient" else position),
    )


def _error(expected: Tensor, found: Tensor, largest: float) -> float:
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    if not expected.is_floating_point():
        return float((expected != found).double().mean()) if not expected.is_complex() else float("inf")
    a, b = expected.detach().double(), found.detach().double()
    away = float((a - b).abs().nan_to_num(0.0 if torch.equal(a.isnan(), b.isnan()) else torch.inf).max())
    return away / max(float(a.abs().nan_to_num(0.0).max()), VANISHING_SCALE * largest, torch.finfo(a.dtype).tiny)


def _described(node: fx.Node) -> str:
    return f"{node.name} ({node.target}) at {source_line(node) or 'an unknown line'}"


def _statistics(x: Tensor) -> str:
    shape = "x".join(map(str, x.shape)) or "scalar"
    if not x.numel():
        return f"{shape}, empty"
    real = x.detach().double() if not x.is_complex() else x.detach().abs().double()
    return f"{shape}, mean {real.mean():.6g}, min {real.min():.6g}, max {real.max():.6g}"

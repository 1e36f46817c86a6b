"""Bisection: the first node of a sharded graph whose value or gradient is not the untouched model's.

On every rank the captured graph runs whole, as on one device, and the rewritten graph runs next to it, both node by
node with autograd.  Each global value has its parts in the local graph::

    global node    value          gradient
    layout S(d)    slice          slice of the whole's gradient
    layout R       whole          whole
    layout P(sum)  -              whole, on each rank

The value that differs first in program order is where a rule computes something else; with all values right, the
gradient that differs last in program order is where the backward first goes wrong, which runs from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard import backend
from fxshard.compare import VANISHING_SCALE, transformed
from fxshard.layout import Layout, Partial, Shard
from fxshard.passes.capture import KEY, SOURCE, Captured
from fxshard.passes.hoist_sums import TERM
from fxshard.passes.pipeline import run_pass
from fxshard.passes.rewrite import VALUES
from fxshard.passes.wrap_gradients import wrap_gradients
from fxshard.provenance import module_path, source_line
from fxshard.trace import Case, build_model
from fxshard.values import is_tensor, plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxshard.passes.config import Config

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Culprit:
    """The first difference, as one rank sees it.

    Args:
        node: Its name in the global graph.
        op: Its operator.
        kind: ``"value"`` or ``"gradient"``.
        error: Largest difference, relative to the largest magnitude.
        layout: How the plan places it.
        inputs: In which layouts the operator gets its inputs.
        module: The module that runs it.
        source: The user's line.
        expected: Statistics of the untouched model's value, at this rank's part.
        found: Statistics of what the rank has.
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

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.module, self.source and f"at {self.source}")))
        return "\n".join(
            [
                f"the {self.kind} of {self.node} ({self.op}) differs by {self.error:.1e}",
                f"    {where or 'no line of the model is known'}",
                f"    layout {self.layout}, inputs {', '.join(self.inputs) or 'none'}",
                f"    untouched  {self.expected}",
                f"    sharded    {self.found}",
            ]
        )


def bisect_on_rank(rank: int, case: Case) -> Culprit | None:
    """Return the first difference on this rank, or None (runs in every rank process of the case's mesh).

    Args:
        rank: Not used: every rank looks at its own part.
        case: What to build, and how it is transformed.
    """
    del rank
    torch.compiler.reset()
    found: list[Culprit | None] = []

    def look(planned: fx.GraphModule, local: fx.GraphModule, config: Config, inputs: Sequence[Any]) -> None:
        found.append(_first_difference(planned, local, config, inputs))

    backend.on_first_call.append(look)
    try:
        model, inputs = build_model(case)
        sharded = transformed(model, case)
        sharded(**inputs) if isinstance(inputs, dict) else sharded(*inputs)
    finally:
        backend.on_first_call.remove(look)
    return next((culprit for culprit in found if culprit is not None), None)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps each node's tensor, with its gradient."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep what it made."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op != "output":
            if result.requires_grad and not result.is_leaf:
                result.retain_grad()
            self.values[n.name] = result
        return result


def _run(gm: fx.GraphModule, feed: Sequence[Any], captured: Captured, skipped: int, seed: int) -> dict[str, Tensor]:
    """Run a graph forward and backward from fixed cotangents and return its values."""
    torch.manual_seed(seed)
    leaves = [
        x.detach().clone().requires_grad_(needs) if isinstance(x, torch.Tensor) else x
        for x, needs in zip(feed, captured.requires_grad, strict=True)
    ]
    recorder = _Recorder(gm)
    with torch.set_grad_enabled(captured.grad_enabled):
        outputs = recorder.run(*leaves)[skipped:]
    generator = torch.Generator().manual_seed(seed)
    wanted = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in wanted]
    if wanted:
        torch.autograd.backward(wanted, cotangents)
    return recorder.values


def _first_difference(
    planned: fx.GraphModule, local: fx.GraphModule, config: Config, feed: Sequence[Any]
) -> Culprit | None:
    captured: Captured = planned.meta[KEY]
    planned = run_pass(wrap_gradients, planned)
    whole = _run(planned, feed, captured, len(captured.updates), seed=0)
    parts = _run(local, feed, captured, 0, seed=0)
    assert config.rank is not None
    pairs = []
    for node in planned.graph.nodes:
        name, plan = local.meta[VALUES].get(node.name), plan_of(node)
        if node.op != "output" and is_tensor(node) and name in parts and plan is not None:
            pairs.append((node, whole[node.name], parts[name], plan.outputs[0]))
    largest = max((float(w.grad.abs().max()) for _, w, _, _ in pairs if w.grad is not None and w.numel()), default=0.0)
    for node, value, part, layout in pairs:
        if node.op == "call_function" and not any(isinstance(p, Partial) for p in layout):
            culprit = _compared(node, "value", _own(value, layout, config), part, 0.0)
            if culprit:
                return culprit
    terms = {n.name for n in local.graph.nodes if TERM in n.meta}  # compared where they are summed: at the input
    for node, value, part, layout in reversed(pairs):
        if value.grad is not None and local.meta[VALUES][node.name] not in terms:
            found = torch.zeros_like(part) if part.grad is None else part.grad
            culprit = _compared(node, "gradient", _own(value.grad, layout, config), found, largest)
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


def _compared(node: fx.Node, kind: str, expected: Tensor, found: Tensor, largest: float) -> Culprit | None:
    same_shape = expected.shape == found.shape
    error = _error(expected, found, largest) if same_shape else float("inf")
    plan = plan_of(node)
    if error <= TOLERANCE or plan is None:
        return None
    return Culprit(
        node=node.name,
        op=str(node.target) if node.op == "call_function" else _input_name(node),
        kind=kind,
        error=error,
        layout=str(plan.outputs[0]),
        inputs=tuple(map(str, plan.inputs)),
        module=module_path(node),
        source=source_line(node),
        expected=_statistics(expected),
        found=_statistics(found),
    )


def _error(expected: Tensor, found: Tensor, largest: float) -> float:
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    if not expected.is_floating_point():
        return float((expected != found).double().mean()) if not expected.is_complex() else float("inf")
    a, b = expected.detach().double(), found.detach().double()
    away = float((a - b).abs().nan_to_num(0.0 if torch.equal(a.isnan(), b.isnan()) else torch.inf).max())
    return away / max(float(a.abs().nan_to_num(0.0).max()), VANISHING_SCALE * largest, torch.finfo(a.dtype).tiny)


def _input_name(node: fx.Node) -> str:
    name = getattr(getattr(node, SOURCE, None), "name", "")
    return f"input {name() if callable(name) else name}"  # a method in 2.11, a property in 2.14


def _statistics(x: Tensor) -> str:
    shape = "x".join(map(str, x.shape)) or "scalar"
    if not x.numel():
        return f"{shape}, empty"
    real = x.detach().double() if not x.is_complex() else x.detach().abs().double()
    return f"{shape}, mean {real.mean():.6g}, min {real.min():.6g}, max {real.max():.6g}"

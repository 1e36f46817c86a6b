"""Dry runs: the plan of a model on a made-up mesh, without processes, GPUs or real tensors.

:func:`plan` captures the model once and runs the passes of a real compilation for one rank of the mesh; nothing is
executed.  With the model and its inputs on ``torch.device("meta")`` no memory is needed either::

    with torch.device("meta"):
        net, image = timm.create_model("convnext_xlarge"), torch.empty(7, 3, 512, 8192)
    print(fxshard.plan(net, image, world_size=8))

What it counts is what real ranks send, to the byte: :mod:`fxshard.report` reads both from the same graphs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from fxshard._torch import unsynchronised_batch_norms
from fxshard.backend import check_choices, split_dims_of
from fxshard.drawing import Drawing, bytes_text
from fxshard.dynamo import capturing, not_captured, traceable_call
from fxshard.emitter import Rank
from fxshard.errors import FxShardError, PlanError
from fxshard.memory import Memory, predict_memory
from fxshard.passes.config import Config
from fxshard.passes.pipeline import localized, planned
from fxshard.plan_files import WITH_MEMORY, WRITERS
from fxshard.program import program
from fxshard.report import NodeReport, PlanReport, describe, describe_local
from fxshard.values import depends_on_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from fxshard.backend import Rng

STAGES = ("global", "local")
"""The graphs of a plan."""
MOST_STAGES = 24
"""How many rows a summary has at most; deeper modules are folded into their parents until it fits."""
ENDINGS = (".txt", *WRITERS, ".py")
"""Of the files that a plan is saved as."""


@dataclass(frozen=True)
class Plan:
    """What fxshard would do, as one rank sees it.

    Args:
        report: Each node's layout, reason and traffic.
        planned: The global graph.
        local: The graph of the rank.
        config: What was asked for.
    """

    report: PlanReport
    planned: fx.GraphModule
    local: fx.GraphModule
    config: Config

    def __str__(self) -> str:
        return self.summary()

    @cached_property
    def memory(self) -> Memory:
        """What the rank keeps in a training step, and the peak; for a large model it takes some seconds."""
        return predict_memory(self.planned, self.local, self.config)

    @property
    def code(self) -> str:
        """The rank's program as Python, under comments that say what its inputs are in the model."""
        return program(self.planned, self.local, self.config)

    def summary(self) -> str:
        """Return a page: one row for each stage of the model, totals, and why something is gathered."""
        ranks, mesh = math.prod(self.report.mesh_shape), " x ".join(map(str, self.report.mesh_shape))
        lines = [f"{ranks} ranks, mesh {mesh}; what rank {self.report.coords} holds and sends in a step", ""]
        lines += _table([_HEAD, *(_row(name, nodes) for name, nodes in self.stages().items())])
        lines += ["", "in all"]
        for way, part in (("forward", self.report.total.forward), ("backward", self.report.total.backward)):
            lines += [
                f"  {way:<9} {kind:<13}{sent.messages:>6} messages {_size(sent.bytes):>11}"
                for kind, sent in part.items()
            ]
        lines += ["", *self._gathers()]
        return "\n".join(lines)

    def _gathers(self) -> list[str]:
        if not self.report.reasons:
            return ["nothing is gathered for want of a rule"]
        return [
            "gathered, or not split",
            *(f"  {count:>4} x {reason}" for reason, count in self.report.reasons.items()),
        ]

    def stages(self) -> dict[str, tuple[NodeReport, ...]]:
        """Return the nodes by module path, cut to the depth at which a summary fits a page."""
        paths = [node.module.split(".") if node.module else [] for node in self.report.nodes]
        for depth in range(max(map(len, paths), default=0), -1, -1):
            found: defaultdict[str, list[NodeReport]] = defaultdict(list)
            for node, path in zip(self.report.nodes, paths, strict=True):
                if node.op not in ("placeholder", "output") and node.shape is not None:
                    found[".".join(path[:depth])].append(node)
            if len(found) <= MOST_STAGES:
                break
        return {name: tuple(nodes) for name, nodes in found.items()}

    def explain(self, name: str) -> str:
        """Return what is done for a node, or for the nodes of a module: layouts, lines, messages, and why a gather.

        Args:
            name: A node's name in the graph, or a module's path.

        Raises:
            PlanError: Neither has this name.
        """
        nodes = [n for n in self.report.nodes if n.name == name]
        nodes = nodes or [n for n in self.report.nodes if n.module == name or n.module.startswith(f"{name}.")]
        if not nodes:
            known = sorted({n.module for n in self.report.nodes if n.module})
            msg = f"the plan has no node and no module {name!r}; modules are {', '.join(known[:20])}, ..."
            raise PlanError(msg)
        return "\n".join(line for node in nodes for line in _explained(node))

    def diff(self, other: Plan) -> str:
        """Return what another plan of the same model does otherwise: totals, then each node.

        Args:
            other: Of the same model; nodes are compared by name.
        """
        kinds = sorted({*self.report.total.forward, *other.report.total.forward, *self.report.total.backward})
        lines = []
        for kind in kinds:
            mine, theirs = self.report.total.of(kind), other.report.total.of(kind)
            if mine != theirs:
                lines.append(
                    f"{kind}: {_size(mine.bytes)} in {mine.messages} -> {_size(theirs.bytes)} in {theirs.messages}"
                )
        theirs_by_name = {n.name: n for n in other.report.nodes}
        for node in self.report.nodes:
            found = theirs_by_name.get(node.name)
            if _place(node) != _place(found):
                lines.append(f"{node.name}: {_place(node)} -> {_place(found)}")
        return "\n".join(lines) or "no difference"

    @cached_property
    def local_report(self) -> PlanReport:
        """The rank's own graph, node by node."""
        return describe_local(self.planned, self.local, self.config)

    def save(self, path: str | Path, *, stage: str = "global", memory: bool = True, title: str = "") -> Path:
        """Write the plan to a file.

        Args:
            path: Its ending says what is written: ``.txt`` the summary, ``.py`` the rank's program, or the graph with
                layouts, communication and reasons: ``.json``, ``.dot``, ``.graphml``, ``.svg`` a picture by modules,
                ``.html`` a page to look around in.
            stage: Which graph: ``"global"``, or ``"local"``, what it was rewritten to for the rank.
            memory: Whether pictures show the memory, too, where it is known; for a large model it takes some seconds.
            title: Of pictures.

        Returns:
            The path.

        Raises:
            PlanError: No such ending, or no such stage.
        """
        path = Path(path)
        check_ending(path)
        if stage not in STAGES:
            msg = f"a plan has no stage {stage!r}: it is one of {', '.join(STAGES)}"
            raise PlanError(msg)
        texts: dict[str, Callable[[], str]] = {".txt": self.summary, ".py": lambda: self.code}
        if path.suffix in WRITERS:
            known = not any(map(depends_on_data, self.planned.graph.nodes))
            shown = self.memory if memory and known and path.suffix in WITH_MEMORY else None
            report = self.report if stage == "global" else self.local_report
            text = WRITERS[path.suffix](Drawing(report, shown, title or "fxshard plan"))
        else:
            text = texts[path.suffix]()
        path.write_text(text + "\n", encoding="utf-8")
        return path


def check_ending(path: Path) -> None:
    """Check that a plan can be saved under this name.

    Raises:
        PlanError: No such ending.
    """
    if path.suffix not in ENDINGS:
        msg = f"a plan cannot be saved as {path.name!r}: the ending is one of {', '.join(ENDINGS)}"
        raise PlanError(msg)


def plan(  # noqa: PLR0913  options, by keyword
    model: torch.nn.Module,
    inputs: torch.Tensor | Sequence[Any],
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    training: bool = True,
    rng: Rng = "match",
    inner_backend: str = "inductor",
) -> Plan:
    """Return the plan of ``model`` on a mesh that need not exist.

    Args:
        model: As for :func:`fxshard.transform`, on any device; on ``meta`` nothing is allocated.
        inputs: What its forward takes, whole; a tensor or a sequence.
        world_size: How many ranks share an image, for a mesh of one axis.
        mesh_shape: Ranks on each mesh axis, in place of ``world_size``.
        placements: As for :func:`fxshard.transform`.
        training: Whether gradients are taken; what a batch norm or a dropout does is the model's own mode.
        rng: As for :func:`fxshard.transform`.
        inner_backend: As for :func:`fxshard.transform`; it decides what is kept for the backward.

    Returns:
        The plan as a rank in the middle of the mesh sees it, who has neighbours on both sides.

    Raises:
        FxShardError: The model cannot be captured whole, or the request does not fit the inputs.

    Example:
        >>> found = plan(torch.nn.Conv2d(3, 8, 7, padding=3), torch.empty(1, 3, 16, 64), world_size=2)
        >>> found.report.total.of("gradient")
        Traffic(messages=1, bytes=4736)
    """
    shape = _mesh_shape(world_size, mesh_shape)
    check_choices({"rng": rng, "inner_backend": inner_backend})
    dims = None if placements is None else split_dims_of(placements, len(shape))
    rank = Rank(tuple(n // 2 for n in shape), tuple(f"axis{a}" for a in range(len(shape))))
    config = Config(mesh_shape=shape, dims=dims, rank=rank, rng=rng, inner_backend=inner_backend)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    with torch.set_grad_enabled(training):
        graph, local = _graphs(model, given, config)
    return Plan(describe(graph, local, config), graph, local, config)


def _mesh_shape(world_size: int | None, mesh_shape: Sequence[int] | None) -> tuple[int, ...]:
    shape = (world_size,) if world_size is not None else tuple(mesh_shape or ())
    if not shape or (world_size is not None and mesh_shape is not None):
        msg = f"world_size={world_size} and mesh_shape={mesh_shape}: give one of them"
        raise PlanError(msg)
    if min(shape) < 1:
        given = f"world_size={world_size}" if mesh_shape is None else f"mesh_shape={shape}"
        msg = f"{given}: there is at least 1 rank on each mesh axis"
        raise PlanError(msg)
    return shape


class _PlannedError(Exception):
    """Ends the call when the graphs are made: there is nothing to run."""


def _graphs(model: torch.nn.Module, inputs: Sequence[Any], config: Config) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Capture the model and run the passes; the graph is not run."""
    found: list[fx.GraphModule | FxShardError] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        try:
            graph = planned(gm, example_inputs, config=config)
            found.extend((graph, localized(graph, config=config)))
        except FxShardError as error:
            found.append(error)

        def end(*_: Any) -> NoReturn:
            raise _PlannedError

        return end

    compiled = torch.compile(traceable_call(model), backend=backend, fullgraph=True, dynamic=False)
    try:
        with capturing(model), unsynchronised_batch_norms():
            compiled(*inputs)
    except _PlannedError:
        pass
    for outcome in found:
        if isinstance(outcome, FxShardError):
            raise outcome
    if not found:
        raise not_captured(model)
    graph, local = found
    assert isinstance(graph, fx.GraphModule)
    assert isinstance(local, fx.GraphModule)
    return graph, local


_HEAD = ("stage", "last map", "layout", "halos", "halo bytes", "reduced", "gathers")


def _row(name: str, nodes: Sequence[NodeReport]) -> tuple[str, ...]:
    last, sent = nodes[-1], [n.sent for n in nodes]
    halos = [s.of("halo") for s in sent]
    reduced = sum(s.of("reduce", "gradient").bytes for s in sent)
    gathered = sum(s.of("gather", "redistribute").bytes for s in sent)
    return (
        name or "(model)",
        "x".join(map(str, last.shape or ())),
        last.layout,
        str(sum(h.messages for h in halos)),
        _size(sum(h.bytes for h in halos)),
        _size(reduced),
        _size(gathered),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = len(widths) - 4  # the last four columns
    return [
        "  ".join(c.rjust(w) if i >= numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _size(count: int) -> str:
    return bytes_text(count) if count else "-"


def _place(node: NodeReport | None) -> str:
    if node is None:
        return "not there"
    layout = node.layout if "(" in node.layout else "whole"
    return f"{layout} ({node.reason})" if node.reason else layout


def _explained(node: NodeReport) -> list[str]:
    shape = "x".join(map(str, node.shape)) if node.shape is not None else ""
    local = "x".join(map(str, node.local_shape)) if node.local_shape is not None else ""
    lines = [f"{node.name}: {node.op} {shape} {node.layout}" + (f", here {local}" if local != shape else "")]
    if node.source:
        lines.append(f"    at {node.source}")
    for way, part in (("forward", node.sent.forward), ("backward", node.sent.backward)):
        lines += [f"    {way} {kind}: {t.messages} messages, {t.bytes:,} bytes" for kind, t in part.items()]
    if node.reason:
        lines.append(f"    {'not split' if node.op == 'placeholder' else 'gathered'}: {node.reason}")
    return lines

"""Dry runs: the plan of a model on a made-up mesh, without processes, GPUs or real tensors.

:func:`plan` captures the model once and runs the passes of a real compilation for one rank of the mesh; nothing is
executed.  With the model and its inputs on ``torch.device("meta")`` no memory is needed either::

    with torch.device("meta"):
        net, image = timm.create_model("convnext_xlarge"), torch.empty(7, 3, 512, 8192)
    print(fxshard.plan(net, image, world_size=8))

What it counts is what real ranks send, to the byte: :mod:`fxshard.report` reads both from the same graphs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from fxshard._torch import unsynchronised_batch_norms
from fxshard.cost import NS
from fxshard.cut_over import choices, in_the_middle
from fxshard.devices import Device, device_named
from fxshard.drawing import Drawing
from fxshard.dynamo import capturing, not_captured, traceable_call
from fxshard.errors import FxShardError, PlanError, shortened
from fxshard.estimates import estimates
from fxshard.memory import Memory, predict_memory
from fxshard.memory_limit import Limit, check_limit
from fxshard.near_names import near_modules
from fxshard.options import check_choices, mesh_shape_of, placements_of, split_dims_of
from fxshard.passes import pipeline
from fxshard.passes.config import Config
from fxshard.passes.plan import image_inputs, split_dims
from fxshard.plan_files import WITH_MEMORY, WRITERS
from fxshard.plan_text import explained, place_of, size_or_dash, stages, summary
from fxshard.program import program
from fxshard.report import NodeReport, PlanReport, describe, describe_local
from fxshard.step_time import waits_ns, work_ns
from fxshard.values import depends_on_data, tensor_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fxshard.options import Placements, Rng

log = logging.getLogger("fxshard")

STAGES = ("global", "local")
"""The graphs of a plan."""
ENDINGS = (".txt", *WRITERS, ".py")
"""Of the files that a plan is saved as."""


@dataclass(frozen=True)
class Plan:
    """What fxshard would do, as one rank sees it.

    Args:
        report: Each node's layout, reason and traffic.
        planned: The global graph.
        local: The graph of the rank.
        config: What was asked for, and decided.
        device: What times are estimated for; None if none was named.
    """

    report: PlanReport
    planned: fx.GraphModule
    local: fx.GraphModule
    config: Config
    device: Device | None = None

    def __str__(self) -> str:
        return self.summary()

    @cached_property
    def memory(self) -> Memory:
        """What the rank keeps in a training step, and the peak; for a large model it takes some seconds.

        Raises:
            PlanError: A size in the model depends on data.
        """
        return predict_memory(self.planned, self.local, self.config)

    @property
    def code(self) -> str:
        """The rank's program as Python, under comments that say what its inputs are in the model."""
        return program(self.planned, self.local, self.config)

    def summary(self) -> str:
        """Return a page: one row for each stage of the model, totals, and why something is gathered."""
        return "\n".join([*summary(self.report), *self._time()])

    def _time(self) -> list[str]:
        if self.device is None:
            return []
        rank, alone = self.step_s
        efficiency = alone / rank / math.prod(self.report.mesh_shape)
        times = f"{1e3 * rank:.2f} ms, {alone / rank:.2f} times as fast as one device alone"
        return [
            "",
            f"estimated step on {self.device.name}: {times}: an efficiency of {100 * efficiency:.0f} %",
            "an estimate from a table of devices, not a measurement",
        ]

    @property
    def step_s(self) -> tuple[float, float]:
        """How long a step takes the busiest rank, and one device alone: an estimate, in seconds.

        Raises:
            PlanError: The plan was made for no device.
        """
        if self.device is None:
            msg = "times are estimated for a device: fxshard.plan(..., device='h200')"
            raise PlanError(msg)
        work, alone = work_ns(self.planned, self.device)
        waits = waits_ns(self.planned, self.local, self.config, self.device.link)
        return (work + sum(waits.values())) / NS, alone / NS

    def stages(self) -> dict[str, tuple[NodeReport, ...]]:
        """Return the nodes by module path, cut to the depth at which a summary fits a page."""
        return stages(self.report)

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
            msg = f"the plan has no node and no module {name!r}"
            names = [n.name for n in self.report.nodes if not n.is_state]
            raise PlanError(msg + near_modules(name, [n.module for n in self.report.nodes], names))
        return "\n".join(explained(nodes))

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
                sizes = f"{size_or_dash(mine.bytes)} in {mine.messages} -> {size_or_dash(theirs.bytes)}"
                lines.append(f"{kind}: {sizes} in {theirs.messages}")
        theirs_by_name = {n.name: n for n in other.report.nodes}
        for node in self.report.nodes:
            found = theirs_by_name.get(node.name)
            if place_of(node) != place_of(found):
                lines.append(f"{node.name}: {place_of(node)} -> {place_of(found)}")
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
    placements: Placements = None,
    training: bool = True,
    rng: Rng = "match",
    inner_backend: str = "inductor",
    device: str | Device | None = None,
    memory_limit_gib: float | None = None,
    memory_budget: float = 1.0,
) -> Plan:
    """Return the plan of ``model`` on a mesh that need not exist.

    The model is captured once and the passes of a real compilation run for one rank; nothing is executed, and no
    process, GPU or group is needed.  What it counts is what real ranks send, to the byte::

        with torch.device("meta"):  # no memory for weights and images
            net, image = timm.create_model("convnext_xlarge"), torch.empty(7, 3, 512, 8192)
        print(fxshard.plan(net, image, world_size=8, placements=[Shard(3)]))

    Args:
        model: As for :func:`fxshard.transform`, on any device; on ``meta`` nothing is allocated.
        inputs: What its forward takes, whole; a tensor or a sequence.
        world_size: How many ranks share an image, for a mesh of one axis.
        mesh_shape: Ranks on each mesh axis, in place of ``world_size``.
        placements: As for :func:`fxshard.transform`.
        training: Whether gradients are taken; what a batch norm or a dropout does is the model's own mode.
        rng: As for :func:`fxshard.transform`.
        inner_backend: As for :func:`fxshard.transform`; it decides what is kept for the backward.
        device: As for :func:`fxshard.transform`; the summary has estimated times then.  Without ``placements`` the
            dimensions with the least time are split, and for a ``world_size`` the mesh has the best of some shapes.
        memory_budget: As for :func:`fxshard.transform`; what is computed again is not in the estimated times.
        memory_limit_gib: What a rank's peak may be, in GiB: the quickest plan that keeps to it is returned.

    Returns:
        The plan as a rank in the middle of the mesh sees it, who has neighbours on both sides.

    Raises:
        PlanError: The mesh, the placements or an option do not fit, no input has what is to be split, or no plan keeps
            to the limit: then with the number of ranks, or the mesh, on which one does.
        CaptureError: The model does not run on these inputs, or cannot be captured whole; with the line.

    Example:
        >>> found = plan(torch.nn.Conv2d(3, 8, 7, padding=3), torch.empty(1, 3, 16, 64), world_size=2)
        >>> found.report.total.of("gradient")
        Traffic(messages=1, bytes=4736)
    """
    shape = mesh_shape_of(world_size, mesh_shape)
    options: dict[str, Any] = {"rng": rng, "inner_backend": inner_backend, "memory_budget": memory_budget}
    check_choices(options)
    images, modules = placements_of(placements)
    dims = None if images is None else split_dims_of(images, len(shape))
    config = in_the_middle(Config(shape, dims, None, whole_modules=modules, **options))
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    found = None if device is None else device_named(device)
    check_limit(memory_limit_gib)
    any_mesh = world_size is not None and dims is None
    try:
        with torch.set_grad_enabled(training):
            started = time.monotonic()
            captured = captured_graph(model, given, config)
            captured_at = time.monotonic()
            if memory_limit_gib is None:
                best = next(_plans(captured, config, found, any_mesh=any_mesh))
            else:

                def on(mesh: tuple[int, ...], device: Device | None) -> Iterator[Plan]:
                    asked = in_the_middle(dataclasses.replace(config, mesh_shape=mesh))
                    return _plans(captured, asked, device, any_mesh=any_mesh, every=True)

                most = _most_ranks(captured, config)
                limit = Limit(memory_limit_gib, lambda mesh: on(mesh, found), lambda mesh: next(on(mesh, None)), most)
                best = limit.quickest(shape)
            times = captured_at - started, time.monotonic() - captured_at
            log.info("%s was captured in %.1f s and planned in %.1f s", type(model).__name__, *times)
            return best
    except FxShardError as error:
        raise shortened(error)  # noqa: B904  its cause is told, or left out


def _plans(captured: fx.GraphModule, config: Config, device: Device | None, **tried: bool) -> Iterator[Plan]:
    """Yield the plans of a captured graph, the quickest first."""
    if device is None:
        graph = pipeline.laid_out(captured, config=config)
        local = pipeline.localized(graph, config=config)
        yield Plan(describe(graph, local, config), graph, local, config)
        return
    for choice in choices(captured, config=config, device=device, **tried):
        report, times = describe(choice.graph, choice.local, choice.config), estimates(choice, device)
        nodes = tuple(dataclasses.replace(node, estimate=times.get(node.name)) for node in report.nodes)
        report = dataclasses.replace(report, nodes=nodes)
        yield Plan(report, choice.graph, choice.local, choice.config, device)


def _most_ranks(captured: fx.GraphModule, config: Config) -> tuple[int, ...]:
    """Return how many ranks can have something of their own on each mesh axis."""
    image = max((tuple(tensor_value(n).shape) for n in image_inputs(captured)), key=math.prod, default=())
    return tuple(image[dim] if 0 <= dim < len(image) else 1 for dim in split_dims(captured, config))


class _CapturedError(Exception):
    """Ends the call when the graph is captured: there is nothing to run."""


def captured_graph(model: torch.nn.Module, inputs: Sequence[Any], config: Config) -> fx.GraphModule:
    """Return the functional global graph of a model; nothing is run.

    Args:
        model: On any device.
        inputs: What its forward takes, whole.
        config: Says how random numbers are drawn.

    Raises:
        CaptureError: The model does not run on these inputs, or cannot be captured whole; with the line.
    """
    found: list[fx.GraphModule | FxShardError] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        try:
            found.append(pipeline.captured(gm, example_inputs, config=config))
        except FxShardError as error:  # Dynamo would wrap it
            found.append(error)

        def end(*_: Any) -> NoReturn:
            raise _CapturedError

        return end

    compiled = torch.compile(traceable_call(model), backend=backend, fullgraph=True, dynamic=False)
    try:
        with capturing(model), unsynchronised_batch_norms():
            compiled(*inputs)
    except _CapturedError:
        pass
    made = found[0] if found else not_captured(model)
    if isinstance(made, FxShardError):
        raise made
    return made

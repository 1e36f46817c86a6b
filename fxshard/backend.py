"""The Dynamo backend: ``torch.compile(model, backend="fxshard", options={...})``.

A failure is raised when the compiled graph is first called, as the :class:`FxShardError` it is: Dynamo wraps
what a backend raises in an error of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard import agreement, artifacts, compared
from fxshard._torch import (
    FakeTensorMode,
    before_groups_end,
    compilation_number,
    dead_draws_kept,
    detect_fake_mode,
    drop_cuda_graphs,
    graph_end,
    hand_on,
    memory_budget,
)
from fxshard.compilations import Compilation, announce, announce_compiler, piece_name
from fxshard.cut_over import planned
from fxshard.description import RUNS, describe_graph
from fxshard.emitter import Rank
from fxshard.errors import FxShardError, InternalError, PlanError, RankMismatchError, again, shortened
from fxshard.functions import watch
from fxshard.graph_breaks import report_cost
from fxshard.guard import Guard, guarded
from fxshard.local_io import Part, part_example, part_of, whole_example, with_local_io
from fxshard.mesh import default_mesh, news_level, summing_groups
from fxshard.near_names import near
from fxshard.ops.gradient_bucket import SumGradients
from fxshard.options import check_choices, mesh_of, options_device, placements_of, split_dims_of
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.config import Config
from fxshard.passes.lower import inner_compiler, lower
from fxshard.passes.outline import copied
from fxshard.passes.pipeline import executable, localized
from fxshard.passes.replace_random import has_random
from fxshard.passes.rewrite import OUTPUTS
from fxshard.program import input_name
from fxshard.provenance import all_nodes, is_communication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a graph was on its way, for who looks for a fault.

    Args:
        source: Dynamo's graph: the model's own operators.
        planned: The global graph.
        local: This rank's graph.
        config: What was asked for.
        run: What the inner backend made of it.
    """

    source: fx.GraphModule
    planned: fx.GraphModule
    local: fx.GraphModule
    config: Config
    run: Callable[..., Any]


on_compiled: list[Callable[[fx.GraphModule, fx.GraphModule, Config], None]] = []
"""Called with (planned global graph, local graph, config) after each rewrite, before the inner backend."""
on_first_call: list[Callable[[Compiled, Sequence[Any]], None]] = []
"""Called with the inputs when a graph that was compiled meanwhile is first called, before it runs."""
OPTIONS = (
    *("mesh", "placements", "inner_backend", "rng", "outputs"),
    *("bucket_cap_mb", "reduce_dtype", "check_every", "device", "kernels", "mode", "memory_budget"),
)
MOST_NAMES = 4
"""How many inputs an error names."""


def fxshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **unknown: object,
) -> Callable[..., Any]:
    """Compile a Dynamo graph for this rank of a spatial mesh.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: What :func:`fxshard.transform` takes by keyword, except ``inputs``.
        mode: As the option.
        unknown: Other keywords of ``torch.compile``; refused.

    Returns:
        A callable with the graph's inputs and outputs; it raises a :class:`FxShardError` when it is called where
        compilation failed.
    """
    given = {**(options or {}), **({} if mode is None else {"mode": mode})}
    wrong = [*(k for k in given if k not in OPTIONS), *(k for k, v in unknown.items() if v is not None)]
    if wrong:
        like = "".join(dict.fromkeys(near(name, OPTIONS) for name in wrong))
        msg = f"unknown options {wrong}{like}; backend='fxshard' takes options with {', '.join(OPTIONS)}"
        return _compiled(functools.partial(_refuse, PlanError(msg)), example_inputs, given)
    return compile_graph(gm, example_inputs, given)


def _refuse(failure: FxShardError, _: Sequence[Any]) -> Callable[..., Any]:
    raise again(failure)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], *, model: str = ""
) -> Callable[..., Any]:
    """Compile a Dynamo graph for this rank of a spatial mesh.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: What :func:`fxshard.transform` takes by keyword, except ``inputs``.
        model: The name of the model that the graph is all of; of a piece, which need not have an image, nothing.

    Returns:
        As :func:`fxshard`.
    """
    return _compiled(functools.partial(_compile, gm, options=options, model=model), example_inputs, options)


def _compiled(
    compiler: Callable[[Sequence[Any]], Callable[..., Any]], example_inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return what ``compiler`` makes of the inputs; where it fails, what raises that, and tries again at later calls.

    Dynamo keeps what it is given, and what failed on one rank has failed on all, perhaps for no fault of the graph.
    """
    failures: list[FxShardError] = []

    def compiled(inputs: Sequence[Any]) -> Callable[..., Any] | None:
        try:
            return compiler(inputs)
        except FxShardError as error:
            failures.append(error)
            return None

    made = compiled(example_inputs)

    def run(*inputs: Any) -> Any:
        nonlocal made
        if made is None and not failures:
            made = compiled(inputs)
        if made is None:
            failure = failures.pop()
            if not isinstance(failure, RankMismatchError):  # else all ranks know
                agreement.announce_failure(mesh_of(options), str(failure), failure)
            raise shortened(failure)
        return made(*inputs)

    return made or run


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A graph that the ranks can compare, before it is compiled.

    Args:
        graph: The global graph.
        local: This rank's.
        config: What was asked for.
        parts: The inputs of which this rank passes its part, by number.
        mode: Of the fake values.
        description: What has to be equal on all ranks.
    """

    graph: fx.GraphModule
    local: fx.GraphModule
    config: Config
    parts: dict[int, Part]
    mode: FakeTensorMode
    description: dict[str, str]


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any], model: str
) -> Callable[..., Any]:
    check_choices(options)
    mesh = options.get("mesh")
    mesh = default_mesh() if mesh is None else mesh
    if mesh.size() == 1 and not _needs_passes(gm, example_inputs, mesh, options):
        with dead_draws_kept(), memory_budget(options.get("memory_budget", Config.memory_budget)):
            whole: Callable[..., Any] = inner_compiler(make_config(mesh, options))(gm, list(example_inputs))
            return whole
    source = copied(gm) if on_first_call else gm  # passes write to it
    started = time.monotonic()
    made = _prepared(gm, example_inputs, mesh, options, piece=not model)
    words = {agreement.WORK: "a graph to compile", **made.description}
    comparison = agreement.agree(mesh, words, time.monotonic() - started)
    state = itertools.compress(example_inputs, made.graph.meta[KEY].is_state)
    compared.remember(mesh, state, comparison)
    artifacts.leave(made.graph, made.local, made.config)
    for observe in on_compiled:
        observe(made.graph, made.local, made.config)
    examples = [part_example(made.parts[i], made.mode) if i in made.parts else v for i, v in enumerate(example_inputs)]
    groups = functools.partial(summing_groups, mesh)
    announce_compiler(made.config, mesh.device_type, news_level(mesh))
    used = {str(node.args[-1]) for node in all_nodes(made.local) if is_communication(node)}
    program = executable(made.local, config=made.config, groups=groups)
    used |= {name for m in program.modules() if isinstance(m, SumGradients) for name in m.bucket.groups}
    hand_on(gm, program)
    lowered = lower(program, examples, config=made.config)
    if mesh.device_type == "cuda":
        before_groups_end(drop_cuda_graphs)
    agreement.agree_that_all_compiled(mesh)
    run = with_local_io(lowered, list(made.parts), mesh, made.local.meta[OUTPUTS])
    compiled = Compiled(source, made.graph, made.local, made.config, run)
    words = {name: made.description[name] for name in RUNS}
    run = _guarded(run, mesh, compiled, words, frozenset(used))
    said = Compilation(model or piece_name(gm), compilation_number(gm), made.graph, time.monotonic() - started)
    _say(said, gm, made, news_level(mesh))
    return _watched(dataclasses.replace(compiled, run=run)) if on_first_call else run


def _prepared(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh, options: dict[str, Any], *, piece: bool
) -> _Prepared:
    """Return the graph, planned.

    Raises:
        FxShardError: It cannot be, or that is a bug.
    """
    try:
        return _prepare(gm, example_inputs, mesh, options, piece=piece)
    except FxShardError:
        raise
    except Exception as error:
        msg = f"a bug of fxshard: {error!r}"
        raise InternalError(msg) from error


def _prepare(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh, options: dict[str, Any], *, piece: bool
) -> _Prepared:
    if mesh.size() > 1:
        check_devices(gm, example_inputs, mesh)
    mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    parts = _parts(example_inputs)
    config = dataclasses.replace(
        make_config(mesh, options),
        parts=tuple((number, part.layout) for number, part in parts.items()),
        piece=piece,
    )
    wholes = [whole_example(parts[i], mode) if i in parts else v for i, v in enumerate(example_inputs)]
    graph, config = planned(gm, wholes, config=config, device=options_device(options))
    local = localized(graph, config=config)
    return _Prepared(graph, local, config, parts, mode, describe_graph(graph, local, wholes, config, mesh))


def check_devices(gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh) -> None:
    """Check that what travels between the ranks is on devices of the mesh: parameters, buffers and images.

    Raises:
        PlanError: Something is not.
    """
    tensors = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    wrong = [
        f"{input_name(node) or node.name} on {value.device}"
        for node, value in tensors
        if isinstance(value, torch.Tensor) and value.ndim and value.device.type != mesh.device_type
    ]
    if wrong:
        more = f", ... ({len(wrong)})" if len(wrong) > MOST_NAMES else ""
        msg = (
            f"the mesh is one of {mesh.device_type!r} devices, elsewhere are {', '.join(wrong[:MOST_NAMES])}{more}; "
            "move the model and its inputs there, or make the mesh with init_device_mesh for their device"
        )
        raise PlanError(msg)


def _say(compilation: Compilation, gm: fx.GraphModule, made: _Prepared, level: int) -> None:
    """Write to the log what was compiled and, of a piece, what the break at its end costs."""
    end = graph_end(gm)
    announce(compilation, level)
    if end is not None and end.is_break:
        report_cost(end, made.graph, made.local, made.config, level)


def _needs_passes(gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh, options: dict[str, Any]) -> bool:
    """Return whether one rank alone has to run what others would, for its draws to be those of eager mode.

    Inductor sorts operators, and draws dropout in the order in which it lets a result lie in memory.
    """
    if options.get("rng") == "counter":  # the same for any number of ranks
        return True
    config = make_config(mesh, options)
    if config.inner_backend != "inductor":
        return False
    try:
        graph, _ = planned(gm, example_inputs, config=config, device=None)
        return has_random(graph)
    except FxShardError as error:
        log.warning("whether its draws are those of eager mode is not known of a model that one rank runs: %s", error)
        return False


def _guarded(
    run: Callable[..., Any],
    mesh: DeviceMesh,
    compiled: Compiled,
    words: dict[str, str],
    groups: frozenset[str],
) -> Callable[..., Any]:
    """Return ``run`` behind a comparison of the ranks, where it has collectives in which they could wait for ever."""
    if not groups:
        return run
    captured: Captured = compiled.planned.meta[KEY]
    inputs = compiled.planned.graph.find_nodes(op="placeholder")
    names = {i: f"parameter or buffer {input_name(n)}" for i, n in enumerate(inputs) if captured.is_state[i]}
    parts = {number for number, _ in compiled.config.parts}
    given = {i: f"input {input_name(n) or n.name}" for i, n in enumerate(inputs) if i not in {*names, *parts}}
    every, draws = compiled.config.check_every, has_random(compiled.planned)
    return guarded(
        run, Guard(mesh, words, names, given, check_every=every, draws=draws, local=compiled.local, groups=groups)
    )


def _watched(compiled: Compiled) -> Callable[..., Any]:
    """Return what runs the graph, with the observers told of its first call."""
    pending = list(on_first_call)

    def watched(*inputs: Any) -> Any:
        while pending:
            pending.pop(0)(compiled, inputs)
        return compiled.run(*inputs)

    return watched


def _parts(example_inputs: Sequence[Any]) -> dict[int, Part]:
    """Return the inputs of which this rank passes its part, by number."""
    found = {}
    for number, value in enumerate(example_inputs):
        part = part_of(value)
        if part is not None:
            found[number] = part
    return found


def make_config(mesh: DeviceMesh, options: dict[str, Any]) -> Config:
    """Return the passes' configuration for this rank.

    Args:
        mesh: Has this rank.
        options: As for :func:`compile_graph`.

    Raises:
        PlanError: The placements do not fit the mesh.
    """
    placements = options.get("placements")
    coords = mesh.get_coordinate()
    assert coords is not None, "check_mesh has seen to it"
    images, modules = placements_of(placements)
    return Config(
        mesh_shape=tuple(mesh.mesh.shape),
        dims=None if images is None else split_dims_of(images, mesh.ndim),
        whole_modules=modules,
        rank=Rank(tuple(coords), tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))),
        inner_backend=options.get("inner_backend", "inductor"),
        rng=options.get("rng", "match"),
        local_outputs=options.get("outputs") == "local",
        bucket_cap_mb=options.get("bucket_cap_mb", Config.bucket_cap_mb),
        reduce_dtype=options.get("reduce_dtype"),
        check_every=options.get("check_every", Config.check_every),
        kernels=options.get("kernels", Config.kernels),
        mode=options.get("mode", Config.mode),
        memory_budget=options.get("memory_budget", Config.memory_budget),
    )


watch(fxshard)

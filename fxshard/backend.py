"""The Dynamo backend: ``torch.compile(model, backend="fxshard", options={...})``.

A failure is raised when the compiled graph is first called, as the :class:`FxShardError` it is: Dynamo wraps
what a backend raises in an error of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard

from fxshard import agreement
from fxshard._torch import FakeTensorMode, dead_draws_kept, detect_fake_mode, lookup_backend
from fxshard.emitter import Rank
from fxshard.errors import FxShardError, PlanError
from fxshard.guard import Guard, generator_digest, guarded
from fxshard.local_io import Part, part_example, part_of, whole_example, with_local_io
from fxshard.meeting import digest
from fxshard.mesh import default_mesh, summing_groups
from fxshard.ops.memory import memory_order
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.config import Config
from fxshard.passes.lower import lower
from fxshard.passes.pipeline import executable, localized, planned
from fxshard.passes.replace_random import has_random
from fxshard.passes.rewrite import OUTPUTS
from fxshard.program import input_name
from fxshard.provenance import is_communication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

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
OPTIONS = ("mesh", "placements", "inner_backend", "rng", "outputs", "bucket_cap_mb", "reduce_dtype", "check_every")
Rng = Literal["match", "counter"]
WHERE = ("global", "local")
"""What inputs and outputs may be."""


def fxshard(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **unknown: object
) -> Callable[..., Any]:
    """Compile a Dynamo graph for this rank of a spatial mesh.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: What :func:`fxshard.transform` takes by keyword, except ``inputs``.
        unknown: Other keywords of ``torch.compile``; refused.

    Returns:
        A callable with the graph's inputs and outputs; it raises a :class:`FxShardError` when it is called where
        compilation failed.
    """
    given = options or {}
    wrong = [*(k for k in given if k not in OPTIONS), *(k for k, v in unknown.items() if v is not None)]
    if wrong:
        msg = f"unknown options {wrong}; backend='fxshard' takes options with {', '.join(OPTIONS)}"
        return _failing(PlanError(msg))
    return compile_graph(gm, example_inputs, given, piece=True)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], *, piece: bool = False
) -> Callable[..., Any]:
    """Compile a Dynamo graph for this rank of a spatial mesh.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: What :func:`fxshard.transform` takes by keyword, except ``inputs``.
        piece: Whether the graph may be a piece of a model, which need not have an image.

    Returns:
        As :func:`fxshard`.
    """
    try:
        return _compile(gm, example_inputs, options, piece=piece)
    except FxShardError as error:
        return _failing(error)


def _failing(failure: FxShardError) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise failure

    return fail


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], *, piece: bool
) -> Callable[..., Any]:
    check_choices(options)
    mesh = options.get("mesh")
    mesh = default_mesh() if mesh is None else mesh
    if mesh.size() == 1 and not _needs_passes(gm, example_inputs, mesh, options):
        with dead_draws_kept():
            return lookup_backend(options.get("inner_backend", "inductor"))(gm, list(example_inputs))
    source = _copied(gm) if on_first_call else gm  # passes write to it
    started = time.monotonic()
    mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        parts = _parts(example_inputs)
        config = dataclasses.replace(
            make_config(mesh, options),
            parts=tuple((number, part.layout) for number, part in parts.items()),
            piece=piece,
        )
        wholes = [whole_example(parts[i], mode) if i in parts else v for i, v in enumerate(example_inputs)]
        graph = planned(gm, wholes, config=config)
        local = localized(graph, config=config)
        local.meta.update(gm.meta)
        description = _description(graph, local, wholes, config)
    except FxShardError as error:
        agreement.agree(mesh, {agreement.FAILED: str(error)}, time.monotonic() - started)
        raise
    agreement.agree(mesh, {agreement.WORK: "a graph to compile", **description}, time.monotonic() - started)
    log.info("compiled %d global nodes to %d local ones", len(graph.graph.nodes), len(local.graph.nodes))
    for observe in on_compiled:
        observe(graph, local, config)
    examples = [part_example(parts[i], mode) if i in parts else v for i, v in enumerate(example_inputs)]
    groups = functools.partial(summing_groups, mesh)
    compiled = lower(executable(local, config=config, groups=groups), examples, config=config)
    run = with_local_io(compiled, list(parts), mesh, local.meta[OUTPUTS])
    made = Compiled(source, graph, local, config, run)
    run = _guarded(run, mesh, made, description)
    return _watched(dataclasses.replace(made, run=run)) if on_first_call else run


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


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
        return has_random(planned(gm, example_inputs, config=config))
    except FxShardError as error:
        log.warning("whether its draws are those of eager mode is not known of a model that one rank runs: %s", error)
        return False


def _guarded(
    run: Callable[..., Any], mesh: DeviceMesh, compiled: Compiled, description: dict[str, str]
) -> Callable[..., Any]:
    """Return ``run`` behind a comparison of the ranks, where it has collectives in which they could wait for ever."""
    if not any(map(is_communication, compiled.local.graph.nodes)):
        return run
    captured: Captured = compiled.planned.meta[KEY]
    inputs = compiled.planned.graph.find_nodes(op="placeholder")
    names = {i: f"parameter or buffer {input_name(n)}" for i, n in enumerate(inputs) if captured.is_state[i]}
    words = {name: description[name] for name in RUNS}
    every, draws = compiled.config.check_every, has_random(compiled.planned)
    return guarded(run, Guard(mesh, words, names, check_every=every, draws=draws))


def _watched(compiled: Compiled) -> Callable[..., Any]:
    """Return what runs the graph, with the observers told of its first call."""
    pending = list(on_first_call)

    def watched(*inputs: Any) -> Any:
        while pending:
            pending.pop(0)(compiled, inputs)
        return compiled.run(*inputs)

    return watched


def check_choices(options: dict[str, Any]) -> None:
    """Check the options that can be judged without a model.

    Raises:
        PlanError: One has another word, or another type.
    """
    for name, words in (("rng", get_args(Rng)), ("inputs", WHERE), ("outputs", WHERE)):
        if options.get(name, words[0]) not in words:
            msg = f"{name}={options[name]!r} is not known; use {' or '.join(map(repr, words))}"
            raise PlanError(msg)
    _check_inner_backend(options.get("inner_backend", "inductor"))
    mesh = options.get("mesh")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        msg = f"mesh={mesh!r} is no DeviceMesh; make one with torch.distributed.device_mesh.init_device_mesh"
        raise PlanError(msg)
    cap = options.get("bucket_cap_mb", Config.bucket_cap_mb)
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap >= 0:
        msg = f"bucket_cap_mb={cap!r} is no size; use MiB, such as {Config.bucket_cap_mb}, or 0 for a bucket each"
        raise PlanError(msg)
    every = options.get("check_every", Config.check_every)
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        msg = f"check_every={every!r} is no number of calls; use 1 for each call, 100, ..., or 0 for never"
        raise PlanError(msg)
    dtype = options.get("reduce_dtype")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        msg = f"reduce_dtype={dtype!r} is no floating dtype; use torch.float32, or None for each parameter's own"
        raise PlanError(msg)


def _check_inner_backend(name: object) -> None:
    known = [n for n in torch.compiler.list_backends(()) if n != fxshard.__name__]
    if name not in known:
        names = ", ".join(n for n in known if not n.endswith("TESTING_ONLY"))
        msg = f"inner_backend={name!r} is not known; use one of {names}"
        raise PlanError(msg)


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

    Raises:
        PlanError: The placements do not fit the mesh.
    """
    placements = options.get("placements")
    coords = mesh.get_coordinate()
    if coords is None:
        msg = f"this rank is not in the mesh {mesh}; transform the model on the ranks of the mesh only"
        raise PlanError(msg)
    return Config(
        mesh_shape=tuple(mesh.mesh.shape),
        dims=None if placements is None else split_dims_of(placements, mesh.ndim),
        rank=Rank(tuple(coords), tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))),
        inner_backend=options.get("inner_backend", "inductor"),
        rng=options.get("rng", "match"),
        local_outputs=options.get("outputs") == "local",
        bucket_cap_mb=options.get("bucket_cap_mb", Config.bucket_cap_mb),
        reduce_dtype=options.get("reduce_dtype"),
        check_every=options.get("check_every", Config.check_every),
    )


def split_dims_of(placements: Sequence[Placement], axes: int) -> tuple[int, ...]:
    """Return the dimension that each mesh axis splits, -1 for ``Replicate``.

    Args:
        placements: DTensor placements, one for each mesh axis.
        axes: How many axes the mesh has.

    Raises:
        PlanError: Another number of placements, another kind, or one dimension twice.
    """
    if len(placements) != axes:
        msg = f"{len(placements)} placements for a mesh of {axes} axes; give one for each axis"
        raise PlanError(msg)
    dims = []
    for placement in placements:
        if isinstance(placement, DTensorShard) and placement.dim >= 0:
            dims.append(placement.dim)
        elif isinstance(placement, DTensorReplicate):
            dims.append(-1)
        else:
            msg = (
                f"placements has {placement!r}; it takes Shard(dim) with dim >= 0, such as Shard(3) for the width of "
                "(N, C, H, W), or Replicate()"
            )
            raise PlanError(msg)
    split = [d for d in dims if d >= 0]
    if len(set(split)) != len(split):
        msg = f"placements {tuple(placements)} split one dimension twice; use a mesh with one axis for it"
        raise PlanError(msg)
    return tuple(dims)


def _description(
    graph: fx.GraphModule, local: fx.GraphModule, example_inputs: Sequence[Any], config: Config
) -> dict[str, str]:
    """Return what has to be equal on all ranks."""
    captured: Captured = graph.meta[KEY]
    given = [v for v, state in zip(example_inputs, captured.is_state, strict=True) if not state]
    state = [v for v, is_state in zip(example_inputs, captured.is_state, strict=True) if is_state]
    compared = agreement.first_time(state)
    return {
        "options": str(dataclasses.replace(config, rank=None)),
        "input shapes": str([tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in given]),
        "captured graph": agreement.graph_digest(graph),
        "parameter and buffer values": agreement.values_digest(state) if compared else "compared before",
        "memory formats": digest(_memory_orders(captured, example_inputs, config)),
        "input values": agreement.values_digest(given) if compared else "not compared again",
        "sequence of collectives": agreement.collectives_digest(local),
        "generator state": generator_digest() if has_random(graph) else "not used",
        "torch": torch.__version__,
    }


RUNS = ("options", "input shapes", "captured graph", "sequence of collectives")
"""What is compared at each call; the rest was when the graph was compiled."""


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

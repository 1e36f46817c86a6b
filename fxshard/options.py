"""The options of ``fxshard.transform`` and of the backend: what can be judged without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.placement_types import Placement

from fxshard.devices import Device, device_named
from fxshard.errors import PlanError
from fxshard.mesh import check_mesh
from fxshard.passes.config import Config

Rng = Literal["match", "counter"]
WHERE = ("global", "local")
"""What inputs and outputs may be."""
INDUCTOR = Config.inner_backend
PARTITIONING = (INDUCTOR, "aot_eager", "aot_eager_decomp_partition")
"""Backends that choose what is kept for the backward."""
MODES = (Config.mode, "reduce-overhead")
"""Of ``torch.compile``'s modes."""
NAME = "fxshard"
"""Of the backend, which cannot be its own inner one."""


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
    options_device(options)
    mesh = options.get("mesh")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        msg = f"mesh={mesh!r} is no DeviceMesh; make one with torch.distributed.device_mesh.init_device_mesh"
        raise PlanError(msg)
    if mesh is not None:
        check_mesh(mesh)
    cap = options.get("bucket_cap_mb", Config.bucket_cap_mb)
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap >= 0:
        msg = f"bucket_cap_mb={cap!r} is no size; use MiB, such as {Config.bucket_cap_mb}, or 0 for a bucket each"
        raise PlanError(msg)
    every = options.get("check_every", Config.check_every)
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        msg = f"check_every={every!r} is no number of calls; use 1 for each call, 100, ..., or 0 for never"
        raise PlanError(msg)
    kernels = options.get("kernels", Config.kernels)
    if not isinstance(kernels, bool):
        msg = f"kernels={kernels!r} is no switch; use True or False"
        raise PlanError(msg)
    _check_mode(options)
    _check_budget(options)
    dtype = options.get("reduce_dtype")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        msg = f"reduce_dtype={dtype!r} is no floating dtype; use torch.float32, or None for each parameter's own"
        raise PlanError(msg)


def _check_mode(options: dict[str, Any]) -> None:
    mode = options.get("mode", Config.mode)
    if mode not in MODES:
        msg = f"mode={mode!r} is not known; use {' or '.join(map(repr, MODES))}"
        msg += "; a mode that times kernels would choose other ones on each rank" if "autotune" in str(mode) else ""
        raise PlanError(msg)
    if mode != Config.mode and options.get("inner_backend", INDUCTOR) != INDUCTOR:
        msg = f"mode={mode!r} is Inductor's, and inner_backend={options['inner_backend']!r}; leave one of them out"
        raise PlanError(msg)


def _check_budget(options: dict[str, Any]) -> None:
    budget = options.get("memory_budget", Config.memory_budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        msg = f"memory_budget={budget!r} is no part of what is kept for the backward; use a number in (0, 1]"
        raise PlanError(msg)
    if budget < 1 and options.get("inner_backend", INDUCTOR) not in PARTITIONING:
        names = " or ".join(map(repr, PARTITIONING))
        msg = f"memory_budget={budget:g} is for backends that choose what is kept; use inner_backend={names}"
        raise PlanError(msg)
    mode = options.get("mode", Config.mode)
    if budget < 1 and mode != Config.mode:
        msg = (
            f"memory_budget={budget:g} with mode={mode!r}: of three runs on GPUs one had wrong results, and why is not "
        )
        msg += "known yet; leave one of them out"
        raise PlanError(msg)


def _check_inner_backend(name: object) -> None:
    known = [n for n in torch.compiler.list_backends(()) if n != NAME]
    if name not in known:
        names = ", ".join(n for n in known if not n.endswith("TESTING_ONLY"))
        msg = f"inner_backend={name!r} is not known; use one of {names}"
        raise PlanError(msg)


def mesh_of(options: dict[str, Any]) -> DeviceMesh | None:
    """Return the mesh whose ranks wait for this one; None for all ranks of the default process group.

    Args:
        options: Not checked.
    """
    mesh = options.get("mesh")
    return mesh if isinstance(mesh, DeviceMesh) else None


def options_device(options: dict[str, Any]) -> Device | None:
    """Return the device that is asked for, None for none.

    Raises:
        PlanError: The table has none of this name.
    """
    device = options.get("device")
    return None if device is None else device_named(device)


Placements: TypeAlias = Sequence[Placement] | Mapping[str, Placement | Sequence[Placement]] | None
"""Of the images, one for each mesh axis; or by patterns of module paths, those of the images under ``""``."""


def placements_of(placements: Placements) -> tuple[Sequence[Placement] | None, tuple[str, ...]]:
    """Return the placements of the images, and the patterns of the modules that run whole.

    Args:
        placements: As :func:`fxshard.transform` takes them.

    Raises:
        PlanError: A module is to be split otherwise than the images.

    Example:
        >>> placements_of({"": [DTensorShard(3)], "decoder.*": DTensorReplicate()})
        ([Shard(dim=3)], ('decoder.*',))
    """
    if not isinstance(placements, Mapping):
        return placements, ()
    for pattern in placements:
        if not isinstance(pattern, str):
            msg = f"placements has {pattern!r} for a module; patterns of paths are strings, such as 'decoder.*'"
            raise PlanError(msg)
    modules = {pattern: wanted for pattern, wanted in placements.items() if pattern}
    for pattern, wanted in modules.items():
        if not all(isinstance(p, DTensorReplicate) for p in (wanted if isinstance(wanted, Sequence) else [wanted])):
            msg = (
                f"placements[{pattern!r}] is {wanted!r}: a module runs whole, Replicate(), or split as the images are; "
                "their placements stand under ''"
            )
            raise PlanError(msg)
    images = placements.get("")
    return [images] if isinstance(images, Placement) else images, tuple(modules)


def split_dims_of(placements: Sequence[Placement], axes: int) -> tuple[int, ...]:
    """Return the dimension that each mesh axis splits, -1 for ``Replicate``.

    Args:
        placements: DTensor placements, one for each mesh axis.
        axes: How many axes the mesh has.

    Raises:
        PlanError: No sequence, another number of placements, another kind, or one dimension twice.
    """
    if not isinstance(placements, (list, tuple)):
        msg = f"placements={placements!r} is no list; give one for each mesh axis, such as [Shard(3)]"
        raise PlanError(msg)
    if len(placements) != axes:
        msg = f"mesh axes: {axes}, placements: {len(placements)}; give one for each axis"
        raise PlanError(msg)
    dims = []
    for placement in placements:
        if isinstance(placement, DTensorShard) and placement.dim >= 0:
            dims.append(placement.dim)
        elif isinstance(placement, DTensorReplicate):
            dims.append(-1)
        else:
            msg = (
                f"placements has {placement!r}; it takes Shard(dim) with dim >= 0, counted from the front as inputs "
                "may have more or fewer dimensions, such as Shard(3) for the width of (N, C, H, W), or Replicate()"
            )
            raise PlanError(msg)
    split = [d for d in dims if d >= 0]
    if len(set(split)) != len(split):
        msg = f"placements {tuple(placements)} split one dimension twice; use a mesh with one axis for it"
        raise PlanError(msg)
    return tuple(dims)


def mesh_shape_of(world_size: int | None, mesh_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ranks on each axis of a mesh that is given in one of two ways.

    Args:
        world_size: How many ranks, for a mesh of one axis.
        mesh_shape: Ranks on each axis.

    Raises:
        PlanError: None is given, or both, or an axis has no rank.
    """
    shape = (world_size,) if world_size is not None else tuple(mesh_shape or ())
    if not shape or (world_size is not None and mesh_shape is not None):
        msg = f"world_size={world_size} and mesh_shape={mesh_shape}: give one of them"
        raise PlanError(msg)
    if min(shape) < 1:
        given = f"world_size={world_size}" if mesh_shape is None else f"mesh_shape={shape}"
        msg = f"{given}: there is at least 1 rank on each mesh axis"
        raise PlanError(msg)
    return shape

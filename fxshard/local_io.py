"""Local inputs and outputs: a rank passes its own part of an image, and keeps its own part of a map.

A graph is captured with global shapes, which no rank can pass when it has only its part.  What Dynamo is given in
its place is a *stand-in*, one element expanded to the global shape; the compiled graph takes the part itself::

    call        part of rank r (N, C, H, W_r)  --stand-in-->  (N, C, H, W), no memory
    Dynamo      guards and captures the global shape
    run         the stand-in is found in the table of this call, and the part goes into the local graph

Parts come as ``DTensor``, which says the global shape itself, or, with ``inputs="local"``, as plain tensors.  Of those
the ranks tell one another the sizes on every call, for a part does not say what the others are: after wholes of
8 + 8 and 12 + 12 columns one of 8 + 12 is new to neither rank alone.  An output that is split leaves as ``DTensor``;
those divide a dimension as ``torch.chunk`` does, so other bounds are moved to it.
"""

from __future__ import annotations

import functools
import json
import logging
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxshard import agreement
from fxshard._torch import FakeTensor
from fxshard.digests import values_digest
from fxshard.errors import PlanError
from fxshard.layout import Layout, Placement, Replicate, Shard, chunk_bounds
from fxshard.mesh import news_level
from fxshard.ops.memory import empty_like_order, memory_order
from fxshard.values import image_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from fxshard._torch import FakeTensorMode

log = logging.getLogger("fxshard")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a rank passes of an input.

    Args:
        value: The part, of the shape that ``layout`` gives this rank.
        shape: The shape of the whole.
        layout: Who has which part.
    """

    value: Tensor
    shape: Shape
    layout: Layout

    @property
    def stand_in(self) -> Tensor:
        """A tensor of the whole's shape and type, with the memory of one element: not a number, should it be read."""
        fill = float("nan") if self.value.is_floating_point() else 0
        one = self.value.detach().new_full((1,), fill)  # not expand: that leaves a last dimension of size 1 its stride
        return one.as_strided(self.shape, [0] * len(self.shape)).requires_grad_(self.value.requires_grad)


_parts: ContextVar[dict[int, Part] | None] = ContextVar("parts", default=None)


def current_parts() -> dict[int, Part]:
    """Return the parts of the call that is running, by the ``id`` of their stand-ins."""
    return _parts.get() or {}


def part_of(value: object) -> Part | None:
    """Return the part that a graph's input stands for in this call; None for an input that is what it is.

    Args:
        value: A stand-in is found by its identity, a fake of one by its shape, dtype and strides that lead nowhere.

    Raises:
        PlanError: Inputs of one shape are split in different ways.
    """
    parts = current_parts()
    if not isinstance(value, FakeTensor) or any(value.stride()):
        return parts.get(id(value))
    shape, dtype = tuple(value.shape), value.dtype
    found = [p for p in parts.values() if (p.shape, p.value.dtype) == (shape, dtype)]
    if len({p.layout for p in found}) > 1:
        msg = f"inputs of shape {shape} are split as {' and '.join(str(p.layout) for p in found)}; split them alike"
        raise PlanError(msg)
    return found[0] if found else None


def whole_example(part: Part, mode: FakeTensorMode) -> Tensor:
    """Return a fake whole that lies in memory as the part does, for capture.

    Args:
        part: What a rank passes.
        mode: Whose fake.
    """
    with mode:
        blank = torch.empty(0, dtype=part.value.dtype, device=part.value.device)
        like = empty_like_order(blank, part.shape, memory_order(part.value))
    return like.requires_grad_(part.value.requires_grad)


def part_example(part: Part, mode: FakeTensorMode) -> Tensor:
    """Return a fake of the part itself, for the inner backend; arguments as :func:`whole_example`'s."""
    value = part.value
    with mode:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.requires_grad_(value.requires_grad)


def with_local_io(
    compiled: Callable[..., Any],
    numbers: Sequence[int],
    mesh: DeviceMesh,
    outputs: Sequence[tuple[Layout, Tensor | None]],
) -> Callable[..., Any]:
    """Return a compiled local graph that takes parts for stand-ins and returns split outputs as DTensor.

    Args:
        compiled: The local graph.
        numbers: Which inputs are stand-ins.
        mesh: The spatial mesh.
        outputs: The layout of each output and its whole, fake.
    """
    if not numbers and all(layout.is_replicated for layout, _ in outputs):
        return compiled

    def run(*inputs: Any) -> Any:
        parts = current_parts()
        given = [parts[id(x)].value if i in numbers else x for i, x in enumerate(inputs)]
        found = compiled(*given)
        return [
            value if like is None or layout.is_replicated else to_dtensor(value, mesh, layout, like)
            for value, (layout, like) in zip(found, outputs, strict=True)
        ]

    return run


def to_dtensor(value: Tensor, mesh: DeviceMesh, layout: Layout, like: Tensor) -> DTensor:
    """Return a rank's part as a DTensor.

    Args:
        value: The part.
        mesh: Whose ranks have the parts.
        layout: Who has which part; from :func:`fxshard.layout.in_chunks`.
        like: The whole, fake.
    """
    placements = [DTensorShard(p.dim) if isinstance(p, Shard) else DTensorReplicate() for p in layout]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


@dataclass
class Entrance:
    """Takes the inputs of a transformed module apart.

    Args:
        mesh: The spatial mesh; called when it is first needed.
        dims: The dimension that each mesh axis splits, -1 for none; None where the caller did not say.
        local: Whether plain image-like tensors are this rank's parts.
    """

    mesh: Callable[[], DeviceMesh]
    dims: tuple[int, ...] | None
    local: bool
    _was_told_of: bool = False
    """Whether the ranks have compared what they pass: once is enough for a mistake of that kind."""

    @contextmanager
    def open(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Give the arguments with stand-ins for parts, for the time of one call.

        Raises:
            PlanError: A DTensor is on another mesh, is a sum's term or is cut elsewhere, or the ranks' parts are not
                of one whole.
            RankMismatchError: A rank did not come.
        """
        leaves, tree = tree_flatten((args, kwargs))
        parts = self._parts(leaves)
        if not parts:
            yield args, kwargs
            return
        alone = self.mesh().size() == 1  # the part is the whole
        stand_ins = {key: part.value if alone else part.stand_in for key, part in parts.items()}
        token = _parts.set({id(stand_ins[key]): part for key, part in parts.items()})
        try:
            args, kwargs = tree_unflatten([stand_ins.get(id(leaf), leaf) for leaf in leaves], tree)
            yield args, kwargs
        finally:
            _parts.reset(token)

    def _parts(self, leaves: Sequence[object]) -> dict[int, Part]:
        """Return the parts among the arguments, by ``id``: the same tensor twice is one."""
        tensors = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
        found = {id(x): self._from_dtensor(x) for x in tensors if isinstance(x, DTensor)}
        images = [tensors[i] for i in image_positions(tensors) if not isinstance(tensors[i], DTensor)]
        if self.local and (images or not found):  # without any, another rank may still pass some
            for image, (shape, layout) in zip(images, self._wholes(images), strict=True):
                found[id(image)] = Part(image, shape, layout)
        return found

    def _from_dtensor(self, x: DTensor) -> Part:
        mesh = self.mesh()
        if x.device_mesh != mesh:
            msg = f"an input of shape {tuple(x.shape)} is a DTensor on {x.device_mesh}, the spatial mesh is {mesh}"
            raise PlanError(msg)
        axes: list[Placement] = []
        for axis, placement in enumerate(x.placements):
            if type(placement) is DTensorShard:
                dim = placement.dim % x.ndim
                axes.append(Shard(dim, chunk_bounds(x.shape[dim], mesh.size(axis))))
            elif placement.is_replicate():
                axes.append(Replicate())
            else:
                msg = f"an input of shape {tuple(x.shape)} is a DTensor with {placement}; pass Shard or Replicate"
                raise PlanError(msg)
        part = Part(x.to_local(), tuple(x.shape), Layout(tuple(axes)))
        _check_cut(part, mesh.get_coordinate())
        return part

    def _wholes(self, images: Sequence[Tensor]) -> Sequence[tuple[Shape, Layout]]:
        """Return the global shape and the layout of each part, from what all ranks pass."""
        mesh = self.mesh()
        assert self.dims is not None
        shapes = [tuple(i.shape) for i in images]
        everyone: Sequence[Sequence[Shape]] = [shapes]
        if mesh.size() > 1:
            values = "" if self._was_told_of else _values(images)
            told = agreement.exchange(mesh, {PARTS: json.dumps([shapes, values])})
            everyone, held = zip(*(json.loads(words[PARTS]) for words in told), strict=True)
            if values and len(set(held)) == 1 and any(d >= 0 for d in self.dims):
                log.log(news_level(mesh), SAME_PARTS, ", ".join(str(tuple(i.shape)) for i in images))
            self._was_told_of = True
        return _wholes(tuple(tuple(map(tuple, s)) for s in everyone), tuple(mesh.mesh.shape), self.dims)


def _values(images: Sequence[Tensor]) -> str:
    """Return a hash of the parts; nothing of parts that have one value everywhere, which all ranks may well pass."""
    varied = [i for i in images if i.numel() and bool((i != i.flatten()[0]).any())]
    return values_digest(varied) if varied else ""


PARTS = "local inputs"
SAME_PARTS = (
    "warning of fxshard: with inputs='local' every rank passed the same values, of shape %s: is that the whole image? "
    "It is taken for one rank's part of an image that repeats; leave inputs='local' out where all ranks pass it whole"
)


@functools.lru_cache(maxsize=256)
def _wholes(
    everyone: tuple[tuple[Shape, ...], ...], mesh_shape: Shape, dims: Shape
) -> tuple[tuple[Shape, Layout], ...]:
    """Return the shape and the layout of what is made of the ranks' parts, for each of their inputs."""
    count = max(len(s) for s in everyone)
    given = [(*s, *[None] * count)[:count] for s in everyone]
    return tuple(whole(parts, mesh_shape, dims) for parts in zip(*given, strict=True))


def _check_cut(part: Part, coords: Sequence[int] | None) -> None:
    """Check that a DTensor's part is what its placements say.

    Raises:
        PlanError: It is not.
    """
    held = tuple(part.value.shape)
    due = held if coords is None else part.layout.local_shape(part.shape, coords)
    if held != due:
        msg = (
            f"an input of shape {part.shape} is a DTensor whose part on this rank has shape {held}, not {due}: "
            "DTensors are cut as torch.chunk cuts; pass another part as a plain tensor, with inputs='local'"
        )
        raise PlanError(msg)


def whole(parts: Sequence[Sequence[int] | None], mesh_shape: Shape, dims: Shape) -> tuple[Shape, Layout]:
    """Return the shape and the layout of what is made of the ranks' parts.

    Args:
        parts: The shape of each rank's part, in the mesh's order; None of a rank that passed none.
        mesh_shape: Ranks on each mesh axis.
        dims: The dimension that each axis splits, -1 for none.

    Raises:
        PlanError: The parts do not fit together.

    Example:
        >>> shape, layout = whole([(1, 3, 8, 5), (1, 3, 8, 4)], (2,), (3,))
        >>> shape, str(layout)
        ((1, 3, 8, 9), '[S(3; 0,5,9)]')
    """
    first = parts[0]
    if first is None or any(p is None or len(p) != len(first) for p in parts):
        raise PlanError(_unfit(parts, "each rank passes a part"))
    grid = torch.tensor(parts).reshape(*mesh_shape, len(first))
    shape = [int(n) for n in grid[(0,) * len(mesh_shape)]]
    axes: list[Placement] = []
    for axis, dim in enumerate(dims):
        if dim < 0:
            axes.append(Replicate())
            continue
        if dim >= len(first):
            raise PlanError(_unfit(parts, f"placements split dim {dim}"))
        lengths = grid.select(-1, dim)[tuple(slice(None) if a == axis else 0 for a in range(len(mesh_shape)))]
        bounds = (0, *(int(n) for n in lengths.cumsum(0)))
        axes.append(Shard(dim, bounds))
        shape[dim] = bounds[-1]
    layout = Layout(tuple(axes))
    for at, part in zip(
        torch.cartesian_prod(*map(torch.arange, mesh_shape)).reshape(len(parts), -1), parts, strict=True
    ):
        if layout.local_shape(shape, at.tolist()) != tuple(part or ()):
            raise PlanError(
                _unfit(parts, f"the other dimensions, and the sizes along each axis of {mesh_shape}, agree")
            )
    return tuple(shape), layout


def _unfit(parts: Sequence[object], rule: str) -> str:
    return f"the ranks' local inputs of shapes {', '.join(map(str, parts))} are no parts of one image: {rule}"

"""Operators that read whole dimensions or move elements: norms, reductions, slices, joins and shuffles."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.operators.family import Apply, Family, Options, Shape, divisor, likely

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from torch import Tensor

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "gate": lambda x: x * torch.sigmoid(x),
    "shift": lambda x: x + 0.5,
}
REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "max", "argmax", "prod", "median")
JOINS: dict[str, Callable[..., Any]] = {
    "flip": lambda x, dim: x.flip(dim),
    "cat": lambda x, dim: torch.cat([x, x.sin()], dim),
    "cat_flip": lambda x, dim: torch.cat([x.flip(dim), 2 * x, x.narrow(dim, 0, 1)], dim),
    "stack": lambda x, dim: torch.stack([x, x.cos()], dim).flatten(dim, dim + 1),
    "repeat": lambda x, dim: x.repeat_interleave(2, dim),
    "tile": lambda x, dim: x.repeat(*(2 if d == dim else 1 for d in range(x.ndim))),
    "diff": lambda x, dim: x.diff(dim=dim),
    "halves": lambda x, dim: torch.mul(*(part.narrow(dim, 0, x.shape[dim] // 2) for part in x.chunk(2, dim))),
    "select": lambda x, dim: x * x.select(dim, x.shape[dim] // 2).unsqueeze(dim),
    "sort": lambda x, dim: x.sort(dim).values,
    "every_other": lambda x, dim: x.index_select(dim, torch.arange(0, x.shape[dim], 2)),
}
SCANS = ("cumsum", "cumprod", "cummax", "logcumsumexp")


class Scale(nn.Module):
    """Multiplies with a parameter for each channel, whose gradient is a sum over all ranks."""

    def __init__(self, channels: int, spatial: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(channels, *(1,) * spatial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Position(nn.Module):
    """Adds a parameter for each position, as wide as the map."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, *shape[1:]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position


class Evaluated(nn.Module):
    """A module whose mode stays that of evaluation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def train(self, mode: bool = True) -> Evaluated:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def build_pointwise(shape: Shape, *, kind: str) -> nn.Module:
    if kind == "scale":
        return Scale(shape[1], len(shape) - 2)
    return Position(shape) if kind == "position" else Apply(POINTWISE[kind])


def draw_pointwise(chance: Random, shape: Shape) -> Options:
    return {"kind": chance.choice((*POINTWISE, "scale", "scale", "position"))}


def draw_batch_norm(chance: Random, shape: Shape) -> Options:
    return {"affine": likely(chance, 0.7), "track": likely(chance, 0.7), "evaluated": likely(chance, 0.2)}


def build_batch_norm(shape: Shape, *, affine: bool, track: bool, evaluated: bool = False) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 3]
    norm = kind(shape[1], affine=affine, track_running_stats=track)
    return Evaluated(norm) if evaluated else norm


def build_instance_norm(shape: Shape, *, affine: bool, track: bool, evaluated: bool = False) -> nn.Module:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 3]
    norm = kind(shape[1], affine=affine, track_running_stats=track)
    return Evaluated(norm) if evaluated else norm


def draw_group_norm(chance: Random, shape: Shape) -> Options:
    return {"groups": divisor(chance, shape[1]), "affine": likely(chance, 0.7)}


def build_group_norm(shape: Shape, *, groups: int, affine: bool) -> nn.Module:
    return nn.GroupNorm(groups, shape[1], affine=affine)


def draw_layer_norm(chance: Random, shape: Shape) -> Options:
    return {"dims": chance.randint(1, len(shape) - 1), "channels_last": likely(chance), "affine": likely(chance, 0.7)}


def build_layer_norm(shape: Shape, *, dims: int, channels_last: bool, affine: bool) -> nn.Module:
    if not channels_last:
        return nn.LayerNorm(shape[-dims:], elementwise_affine=affine)
    back = functools.partial(torch.movedim, source=-1, destination=1)
    there = functools.partial(torch.movedim, source=1, destination=-1)
    return nn.Sequential(Apply(there), nn.LayerNorm(shape[1], elementwise_affine=affine), Apply(back))


def draw_response_norm(chance: Random, shape: Shape) -> Options:
    return {"size": chance.randint(1, 3)}


def draw_reduce(chance: Random, shape: Shape) -> Options:
    kind = chance.choice(REDUCTIONS)
    dims = tuple(d for d in range(len(shape)) if likely(chance))
    if kind in ("max", "argmax", "prod", "median"):
        dims = (chance.randrange(len(shape)),)
    return {"kind": kind, "dims": dims or (len(shape) - 1,), "mixed": likely(chance, 0.6)}


def build_reduce(shape: Shape, *, kind: str, dims: Shape, mixed: bool) -> nn.Module:
    """Reduce; mixed, the result is mixed into the map, and the chain goes on with a map."""
    function = torch.linalg.vector_norm if kind == "norm" else getattr(torch, kind)
    dim: Any = dims[0] if kind in ("max", "argmax", "prod", "median") else dims

    def reduced(x: Tensor) -> Any:
        found = function(x, dim=dim, keepdim=mixed)
        if not mixed:
            return tuple(found) if isinstance(found, tuple) else found
        values = found[0] if isinstance(found, tuple) else found
        return x - 0.5 * values

    return Apply(reduced)


def draw_softmax(chance: Random, shape: Shape) -> Options:
    return {"kind": chance.choice(("softmax", "log_softmax", "normalize")), "dim": chance.randrange(len(shape))}


def build_softmax(shape: Shape, *, kind: str, dim: int) -> nn.Module:
    return Apply(getattr(F, kind), dim=dim)


def draw_slice(chance: Random, shape: Shape) -> Options:
    cuts = []
    for size in shape[1:]:
        start = chance.randrange(size) if likely(chance) else 0
        stop = chance.randint(start + 1, size) if likely(chance) else size
        cuts.append((start, stop, chance.choice((1, 1, 2, 3, 5))))
    return {"cuts": tuple(cuts), "written": likely(chance, 0.3)}


def build_slice(shape: Shape, *, cuts: tuple[Shape, ...], written: bool) -> nn.Module:
    where = (slice(None), *(slice(*cut) for cut in cuts))

    def cut(x: Tensor) -> Tensor:
        if not written:
            return x[where]
        y = x * 1.5
        y[where] = y[where].cos()
        return y

    return Apply(cut)


def draw_roll(chance: Random, shape: Shape) -> Options:
    dims = [d for d in range(1, len(shape)) if likely(chance)] or [len(shape) - 1]
    return {"shifts": tuple(chance.randint(-9, 9) for _ in dims), "dims": tuple(dims)}


def draw_join(chance: Random, shape: Shape) -> Options:
    return {"kind": chance.choice(tuple(JOINS)), "dim": chance.randrange(1, len(shape))}


def build_join(shape: Shape, *, kind: str, dim: int) -> nn.Module:
    return Apply(JOINS[kind], dim=dim)


def draw_scan(chance: Random, shape: Shape) -> Options:
    return {"kind": chance.choice(SCANS), "dim": chance.randrange(1, len(shape))}


def build_scan(shape: Shape, *, kind: str, dim: int) -> nn.Module:
    return Apply(getattr(torch, kind), dim=dim)


def draw_shuffle(chance: Random, shape: Shape) -> Options:
    kinds = ("pixel_unshuffle", "pixel_shuffle", "channel_shuffle", "transpose", "flatten", "split_rows")
    kind = chance.choice(kinds)
    return {"kind": kind, "factor": 2 if kind.startswith("pixel") else divisor(chance, shape[1])}


def build_shuffle(shape: Shape, *, kind: str, factor: int) -> nn.Module:
    if kind == "pixel_shuffle":
        return Apply(lambda x: F.pixel_shuffle(torch.cat([x, x.sin(), x.cos(), 2 * x], 1), factor))
    if kind == "transpose":
        return Apply(torch.transpose, dim0=2, dim1=len(shape) - 1)
    if kind == "flatten":
        return Apply(torch.flatten, start_dim=2)
    if kind == "split_rows":  # windows of two rows, as windowed attention makes them
        return Apply(lambda x: x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).flatten(-2))
    if kind == "channel_shuffle":
        return Apply(lambda x: x.unflatten(1, (factor, -1)).transpose(1, 2).flatten(1, 2))
    return Apply(getattr(F, kind), factor)


def draw_mixer(chance: Random, shape: Shape) -> Options:
    return {"dim": chance.randrange(1, len(shape)), "out": chance.randint(1, 5)}


def build_mixer(shape: Shape, *, dim: int, out: int) -> nn.Module:
    there = functools.partial(torch.transpose, dim0=dim, dim1=-1)
    return nn.Sequential(Apply(there), nn.Linear(shape[dim], out), Apply(there))


MAPPED = {
    "pointwise": Family(draw_pointwise, build_pointwise),
    "batch_norm": Family(draw_batch_norm, build_batch_norm, weight=3),
    "instance_norm": Family(draw_batch_norm, build_instance_norm, weight=2),
    "group_norm": Family(draw_group_norm, build_group_norm, weight=2),
    "layer_norm": Family(draw_layer_norm, build_layer_norm, weight=2),
    "response_norm": Family(draw_response_norm, lambda shape, size: nn.LocalResponseNorm(size), weight=1),
    "reduce": Family(draw_reduce, build_reduce, weight=4),
    "softmax": Family(draw_softmax, build_softmax, weight=2),
    "slice": Family(draw_slice, build_slice, weight=4),
    "roll": Family(draw_roll, lambda shape, **options: Apply(torch.roll, **options)),
    "join": Family(draw_join, build_join, weight=5),
    "scan": Family(draw_scan, build_scan),
    "shuffle": Family(draw_shuffle, build_shuffle, spatial=(2, 3), weight=3),
    "linear": Family(draw_mixer, build_mixer),
}

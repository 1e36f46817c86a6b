"""Pointwise operators: every output element depends on the elements at its own position.

All inputs are brought to the split of one of them; an input that is broadcast along the split
dimension stays whole::

    x      (N, C, H, W)   Shard(3)      ->  the one with most elements decides
    mask   (H, W)         Replicate     ->  Shard(1), a local slice
    scale  (C, 1, 1)      Replicate     ->  Replicate (its gradient is summed)

Proof of the rows: element-wise functions commute with restriction to a set of positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxshard.rules.call import OpCall

aten = torch.ops.aten


def shifted(placement: Placement, by: int) -> Placement:
    """Return the placement with its dimension number moved by ``by``."""
    if isinstance(placement, Shard):
        return Shard(placement.dim + by, placement.bounds, placement.outer, placement.held)
    return placement


def leading_shard(shapes: Sequence[Sequence[int]], at: Sequence[Placement], out_shape: Sequence[int]) -> Shard | None:
    """Return the split, in output dimensions, of the largest input that is split and not broadcast there.

    Args:
        shapes: Global input shapes, aligned at the last dimension with ``out_shape``.
        at: Their placements.
        out_shape: The global output shape.
    """
    found: list[tuple[int, Shard]] = []
    for shape, placement in zip(shapes, at, strict=True):
        if isinstance(placement, Shard):
            moved = Shard(placement.dim + len(out_shape) - len(shape), placement.bounds, placement.outer)
            if out_shape[moved.dim] == shape[placement.dim]:
                found.append((math.prod(shape), moved))
    return max(found, key=lambda item: item[0])[1] if found else None


def aligned(shape: Sequence[int], shard: Shard, out_shape: Sequence[int]) -> Placement:
    """Return how an input of ``shape`` has to be placed for an output that is split by ``shard``."""
    dim = shard.dim - (len(out_shape) - len(shape))
    if dim < 0 or shape[dim] != out_shape[shard.dim]:
        return Replicate()
    return Shard(dim, shard.bounds, shard.outer)


@rule(
    torch.Tag.pointwise,
    aten.hardswish.default,  # from here on: pointwise, but not tagged so
    aten.leaky_relu.default,  # not tagged in torch 2.11
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.polar.default,
    aten.complex.default,
    aten.real.default,
    aten.imag.default,
    aten._conj.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten._prelu_kernel.default,
    aten.special_i0.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    torch.ops.fxshard.renew.default,
    nested=True,
    split_as=lambda *a: _split(*a),
)
def place_pointwise(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Bring every input to the split of the largest."""
    shapes = [call.shape(i) for i in range(len(call.inputs))]
    out_shape = call.out_shape
    shard = leading_shard(shapes, at, out_shape)
    if shard is None:
        return Gather("no input is split along an output dimension")
    return _split(call, at, shard)


def _split(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row:
    shapes = (call.shape(i) for i in range(len(call.inputs)))
    inputs = tuple(aligned(shape, wanted, call.out_shape) for shape in shapes)
    return Row(inputs, (wanted,) * len(call.output_values))


@rule(aten.type_as.default, aten.to.other)
def place_type_as(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write it without the other tensor, which may have any shape: only its dtype and device matter."""
    return Expand(_like)


def _like(
    x: Tensor,
    other: Tensor,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return x.to(other.device, other.dtype, non_blocking, copy, memory_format=memory_format)


@rule(aten.log_sigmoid.default)
def place_log_sigmoid(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write it with softplus: ATen's own form keeps a buffer whose shape depends on the device."""
    return Expand(lambda x: -aten.softplus.default(-x, 1, 50))

"""``fxshard::slice``: Replicate -> Shard, this rank's part of a tensor that every rank has.

Nothing travels.  The gradient of the whole is made of the ranks' gradients of their parts, so the backward is
:mod:`fxshard.ops.all_gather`::

    whole      [0 1 2 3 4 5]                gradient   [a b c d e f]
    rank 0     [0 1 2]                      of rank 0  [a b c]
    rank 1           [3 4 5]                of rank 1        [d e f]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.lowering import define, differentiate
from fxshard.ops.memory import check_size, empty_like_order, join, memory_order, with_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@define("slice", "(Tensor x, int dim, int[] bounds, int outer, int rank, str group) -> Tensor")
def slice_(x: Tensor, dim: int, bounds: Sequence[int], outer: int, rank: int, group: str) -> Tensor:  # noqa: ARG001
    """Return this rank's part.

    Args:
        x: The whole tensor; ``dim`` has ``outer * bounds[-1]`` positions.
        dim: The dimension to split, not negative.
        bounds: Who owns what of the split factor, ``n + 1`` integers.
        outer: The factor in front of the split one.
        rank: This rank's place in ``group``.
        group: The name of the process group, for the backward.

    Returns:
        A new tensor with ``outer * (bounds[rank + 1] - bounds[rank])`` positions in ``dim``, in the memory format
        of ``x`` (contiguous when ``outer`` is not 1).

    Raises:
        FxShardError: The bounds do not fit ``x``.
    """
    check_size("slice", x, dim, outer * bounds[-1], rank)
    start, length = bounds[rank], bounds[rank + 1] - bounds[rank]
    if outer == 1:
        return join([x.narrow(dim, start, length)], dim, memory_order(x))
    part = x.unflatten(dim, (outer, bounds[-1])).narrow(dim + 1, start, length)
    return part.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


@slice_.register_fake
def _(x: Tensor, dim: int, bounds: Sequence[int], outer: int, rank: int, group: str) -> Tensor:  # noqa: ARG001
    check_size("slice", x, dim, outer * bounds[-1], rank)
    order = memory_order(x) if outer == 1 else tuple(range(x.dim()))
    return empty_like_order(x, with_size(x.shape, dim, outer * (bounds[rank + 1] - bounds[rank])), order)


def _backward(grad: Tensor, *args: Any) -> Tensor:
    return torch.ops.fxshard.all_gather(grad, *args)


differentiate(slice_, _backward)

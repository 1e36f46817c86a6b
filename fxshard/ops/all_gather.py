"""``fxshard::all_gather``: Shard -> Replicate, the whole tensor on every rank.

The split dimension is read as ``(outer, part)``; uneven parts are padded to the longest on the wire::

    rank 0  [0 1 2]              [0 1 2]
    rank 1  [3 4 .]   gather     [3 4 .]   cut and join   [0 1 2 3 4 5]
    rank 2  [5 . .]   ------>    [5 . .]   ----------->

The result is the same on every rank and so is its gradient: the backward is :mod:`fxshard.ops.slice`, without a
reduction.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.lowering import define, differentiate
from fxshard.ops.memory import check_size, empty_like_order, join, memory_order, with_size
from fxshard.ops.wire import as_received, as_sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@define("all_gather", "(Tensor x, int dim, int[] bounds, int outer, int rank, str group) -> Tensor")
def all_gather(x: Tensor, dim: int, bounds: Sequence[int], outer: int, rank: int, group: str) -> Tensor:
    """Return the whole tensor.

    Args:
        x: This rank's part; ``dim`` has ``outer * (bounds[rank + 1] - bounds[rank])`` positions.
        dim: The dimension that is split, not negative.
        bounds: Who owns what of the split factor, ``n + 1`` integers.
        outer: The factor in front of the split one.
        rank: This rank's place in ``group``.
        group: The name of the process group.

    Returns:
        A new tensor with ``outer * bounds[-1]`` positions in ``dim``, in the memory format of ``x`` (contiguous
        when ``outer`` is not 1).

    Raises:
        FxShardError: The bounds do not fit ``x``.
    """
    lengths = [hi - lo for lo, hi in pairwise(bounds)]
    check_size("all_gather", x, dim, outer * lengths[rank], rank)
    order = _result_order(x, outer)
    if outer == 1:
        return join(_all_parts(x, dim, lengths, rank, group), dim, order)
    parts = _all_parts(x.unflatten(dim, (outer, lengths[rank])), dim + 1, lengths, rank, group)
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


def _all_parts(x: Tensor, dim: int, lengths: list[int], rank: int, group: str) -> list[Tensor]:
    longest = max(lengths)
    if len(lengths) == 1 or longest == 0:
        return [x]
    padding = x.new_zeros(with_size(x.shape, dim, longest - lengths[rank]))
    padded = as_sent(torch.cat([x, padding], dim) if lengths[rank] < longest else x).contiguous()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(padded, len(lengths), group)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered).view(len(lengths), *padded.shape)
    gathered = as_received(gathered, x.dtype)
    return [gathered.select(0, r).narrow(dim, 0, length) for r, length in enumerate(lengths)]


def _result_order(x: Tensor, outer: int) -> tuple[int, ...]:
    return memory_order(x) if outer == 1 else tuple(range(x.dim()))


@all_gather.register_fake
def _(x: Tensor, dim: int, bounds: Sequence[int], outer: int, rank: int, group: str) -> Tensor:  # noqa: ARG001
    check_size("all_gather", x, dim, outer * (bounds[rank + 1] - bounds[rank]), rank)
    return empty_like_order(x, with_size(x.shape, dim, outer * bounds[-1]), _result_order(x, outer))


def _backward(grad: Tensor, *args: Any) -> Tensor:
    return torch.ops.fxshard.slice(grad, *args)


differentiate(all_gather, _backward)

"""``fxshard::redistribute``: Shard(a) -> Shard(b), a tensor split in one dimension becomes split in another.

::

    rank 0   | a b c |            rank 0   | a b |      rank 0 keeps "a b", gets the "a b" of rank 1
    rank 1   | d e f |   ---->             | d e |
                                  rank 1   | c |
                                           | f |

Every element has one place before and one after: a permutation, whose adjoint is its inverse, the reverse
redistribution.  New bounds of the same dimension are :mod:`fxshard.ops.halo_exchange`'s.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from fxshard.errors import FxShardError
from fxshard.ops.lowering import define, differentiate
from fxshard.ops.memory import check_size, empty_like_order, join, memory_order, with_size
from fxshard.ops.wire import swap_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SCHEMA = "(Tensor x, int from_dim, int[] from_bounds, int to_dim, int[] to_bounds, int rank, str group) -> Tensor"


@define("redistribute", SCHEMA)
def redistribute(
    x: Tensor, from_dim: int, from_bounds: Sequence[int], to_dim: int, to_bounds: Sequence[int], rank: int, group: str
) -> Tensor:
    """Return this rank's part of the other split.

    Args:
        x: This rank's part of the split of ``from_dim``, whole in ``to_dim``.
        from_dim: The dimension that is split.
        from_bounds: Who owns what of it, ``n + 1`` integers.
        to_dim: The dimension to split, another one.
        to_bounds: Who will own what of it, ``n + 1`` integers.
        rank: This rank's place in ``group``.
        group: The name of the process group.

    Returns:
        A new tensor, whole in ``from_dim`` and with ``to_bounds[rank + 1] - to_bounds[rank]`` positions in
        ``to_dim``, in the memory format of ``x``.

    Raises:
        FxShardError: The arguments do not fit ``x``.
    """
    _check(x, from_dim, from_bounds, to_dim, to_bounds, rank)
    parts = [x.narrow(to_dim, lo, hi - lo) for lo, hi in pairwise(to_bounds)]
    received = [[parts[rank]]]
    if len(parts) > 1:
        outgoing = [[] if target == rank else [part] for target, part in enumerate(parts)]
        shapes = [with_size(parts[rank].shape, from_dim, hi - lo) for lo, hi in pairwise(from_bounds)]
        incoming = [[] if source == rank else [shape] for source, shape in enumerate(shapes)]
        received = swap_blocks(outgoing, incoming, x, group)
        received[rank] = [parts[rank]]
    return join([block for blocks in received for block in blocks], from_dim, memory_order(x))


def _check(
    x: Tensor, from_dim: int, from_bounds: Sequence[int], to_dim: int, to_bounds: Sequence[int], rank: int
) -> None:
    if from_dim == to_dim:
        msg = f"fxshard::redistribute: both splits are of dim {to_dim}; use halo_exchange for new bounds of it"
        raise FxShardError(msg)
    check_size("redistribute", x, from_dim, from_bounds[rank + 1] - from_bounds[rank], rank)
    check_size("redistribute", x, to_dim, to_bounds[-1], rank)


@redistribute.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    from_dim, from_bounds, to_dim, to_bounds, rank, _ = args
    _check(x, from_dim, from_bounds, to_dim, to_bounds, rank)
    shape = with_size(x.shape, from_dim, from_bounds[-1])
    shape = with_size(shape, to_dim, to_bounds[rank + 1] - to_bounds[rank])
    return empty_like_order(x, shape, memory_order(x))


def _backward(grad: Tensor, *args: Any) -> Tensor:
    from_dim, from_bounds, to_dim, to_bounds, rank, group = args
    return torch.ops.fxshard.redistribute(grad, to_dim, to_bounds, from_dim, from_bounds, rank, group)


differentiate(redistribute, _backward)

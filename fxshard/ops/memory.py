"""Memory order: results are laid out in memory as their input is.

The *memory order* of a tensor lists its dimensions from the slowest to the fastest::

    contiguous     (N, C, H, W)   order (0, 1, 2, 3)
    channels_last  (N, C, H, W)   order (0, 2, 3, 1)   in memory N H W C

Pieces are joined in that order, so a channels_last activation is written once and never transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from fxshard.errors import FxShardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Order: TypeAlias = tuple[int, ...]

CHANNELS_LAST: dict[int, tuple[torch.memory_format, Order]] = {
    4: (torch.channels_last, (0, 2, 3, 1)),
    5: (torch.channels_last_3d, (0, 2, 3, 4, 1)),
}
"""The channels-last format and its order, by the number of dimensions."""


def memory_order(x: Tensor) -> Order:
    """Return the dimensions of ``x`` from the slowest to the fastest in memory.

    Example:
        >>> memory_order(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    # the strides of a dimension of size 1 say nothing, so the two formats are asked for before strides are sorted
    if x.is_contiguous():
        return tuple(range(x.dim()))
    if x.dim() in CHANNELS_LAST:
        memory_format, order = CHANNELS_LAST[x.dim()]
        if x.is_contiguous(memory_format=memory_format):
            return order
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape lie alike in memory; a dimension of size 1 has no stride to speak of."""
    return all(size <= 1 or s == t for size, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def is_dense(x: Tensor) -> bool:
    """Return whether the elements of ``x`` are one stretch of memory, each once.

    Example:
        >>> x = torch.empty(3, 4)
        >>> is_dense(x), is_dense(x.t()), is_dense(x[:, 1:]), is_dense(x[:1].expand(3, 4))
        (True, True, False, False)
    """
    expected = 1
    for dim in sorted((d for d in range(x.dim()) if x.shape[d] != 1), key=x.stride):
        if x.stride(dim) != expected:
            return x.numel() == 0
        expected *= x.shape[dim]
    return True


def fills_storage(x: Tensor) -> bool:
    """Return whether the storage of ``x`` has the elements of ``x`` and nothing else.

    Example:
        >>> x = torch.empty(3, 4)
        >>> fills_storage(x.t()), fills_storage(x[1:])
        (True, False)
    """
    size = x.numel() * x.element_size()
    return is_dense(x) and int(x.storage_offset()) == 0 and int(x.untyped_storage().nbytes()) == size


def inverse(order: Order) -> Order:
    """Return the permutation that undoes ``order``.

    Example:
        >>> inverse((0, 2, 3, 1))
        (0, 3, 1, 2)
    """
    return tuple(order.index(d) for d in range(len(order)))


def join(blocks: Sequence[Tensor], dim: int, order: Order) -> Tensor:
    """Concatenate ``blocks`` along ``dim`` into a new tensor whose memory order is ``order``."""
    joined = torch.cat([block.permute(order) for block in blocks], order.index(dim))
    return joined.contiguous().permute(inverse(order))


def empty_like_order(x: Tensor, shape: Sequence[int], order: Order) -> Tensor:
    """Return an uninitialised tensor of ``shape`` with the type of ``x`` and memory order ``order``."""
    return x.new_empty([shape[d] for d in order]).permute(inverse(order))


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return ``shape`` with another size of ``dim``.

    Example:
        >>> with_size((2, 3, 4), 1, 9)
        [2, 9, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def check_size(operator: str, x: Tensor, dim: int, size: int, rank: int) -> None:
    """Check that ``x`` is what the bounds say the rank holds.

    Raises:
        FxShardError: ``dim`` of ``x`` has another size.
    """
    if x.shape[dim] != size:
        msg = (
            f"fxshard::{operator}: rank {rank} holds {x.shape[dim]} positions of dim {dim} (shape {tuple(x.shape)}), "
            f"but the bounds give it {size}; the layout of its input and its arguments do not fit together"
        )
        raise FxShardError(msg)

"""What travels: blocks of tensors packed into one flat buffer, one ``all_to_all_single`` for all of them.

::

    rank r      [ to rank 0 | to rank 1 | ... ]     sizes exact, zero for who gets nothing
                      |           |
                  all_to_all_single                 one message per neighbour
                      |           |
    rank t      [ of rank 0 | of rank 1 | ... ]

Every rank takes part, also one that sends nothing.  If the left and the right neighbour are the same rank, both
strips are in its part of the buffer.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import torch

from fxshard.ops.memory import CHANNELS_LAST, Order, inverse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Shape = tuple[int, ...] | list[int]


def wire_order(dims: int) -> Order:
    """Return the order in which a block's dimensions travel, from the slowest to the fastest.

    It depends on nothing but the number of dimensions: the strides of a thin part can be ambiguous and may be
    read differently by the rank at the other end.  Channels last, because then a strip of columns is a few long
    runs in a channels_last activation, and short runs in any case in a contiguous one.
    """
    return CHANNELS_LAST[dims][1] if dims in CHANNELS_LAST else tuple(range(dims))


def swap_blocks(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Shape]], like: Tensor, group: str
) -> list[list[Tensor]]:
    """Send blocks to every rank and receive theirs.

    Args:
        outgoing: For each rank, the blocks that go there.
        incoming: For each rank, the shapes of the blocks that come from there, in the sender's order.
        like: Gives the number of dimensions, the dtype and the device.
        group: The name of the process group.

    Returns:
        For each rank, the blocks that came from there, as views into the receive buffer.
    """
    order = wire_order(like.dim())
    flat = [block.permute(order).reshape(-1) for block in chain.from_iterable(outgoing)]
    buffer = torch.cat(flat) if flat else like.new_empty(0)
    width = 2 if like.is_complex() else 1  # numbers per element on the wire
    sent = [width * sum(block.numel() for block in blocks) for blocks in outgoing]
    received = [width * sum(math.prod(shape) for shape in shapes) for shapes in incoming]
    buffer = torch.ops._c10d_functional.all_to_all_single(as_sent(buffer).reshape(-1), received, sent, group)
    buffer = torch.ops._c10d_functional.wait_tensor(buffer)
    return _unpack(as_received(buffer.view(-1, 2) if width == 2 else buffer, like.dtype), incoming, order)


def as_sent(x: Tensor) -> Tensor:
    """Return ``x`` as collectives take it: complex numbers as a last dimension of 2, truth values as bytes.

    Inductor (seen on torch 2.14) takes the size of the group, an argument of ``all_gather_into_tensor``, for an operand
    of type promotion: of truth values it makes int64, by which no mask can index and which an output must not become.
    """
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def as_received(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a collective gave as values of ``dtype``; the reverse of :func:`as_sent`."""
    if dtype.is_complex:
        return torch.view_as_complex(x)
    return x.to(torch.bool) if dtype == torch.bool else x  # not by a view: Inductor's C++ cannot blend with one


def _unpack(buffer: Tensor, incoming: Sequence[Sequence[Shape]], order: Order) -> list[list[Tensor]]:
    blocks: list[list[Tensor]] = []
    start = 0
    for shapes in incoming:
        blocks.append([])
        for shape in shapes:
            size = math.prod(shape)
            block = buffer.narrow(0, start, size).view([shape[d] for d in order])
            blocks[-1].append(block.permute(inverse(order)))
            start += size
    return blocks


def with_token(x: Tensor, dim: int) -> tuple[list[Tensor], list[Shape]]:
    """Return what a rank sends itself as a token, a column of ``x``, and its shape; nothing of an empty ``x``."""
    token = x.narrow(dim, 0, min(1, x.shape[dim]))
    return [token], [tuple(token.shape)]


def tied(x: Tensor, token: Tensor) -> Tensor:
    """Return ``x``, in a way that depends on ``token`` for every compiler.

    Args:
        x: Any tensor.
        token: Broadcast against it; never chosen, because nothing is larger than infinity.
    """
    if not token.numel():
        return x
    chosen = token.abs() > math.inf if token.is_floating_point() or token.is_complex() else token != token  # noqa: PLR0124
    return torch.where(chosen, token, x)

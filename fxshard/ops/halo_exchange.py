"""``fxshard::halo_exchange``: bring every rank the window it needs from those who own it.

::

    owned by    |   rank 0    |   rank 1    |   rank 2    |
    window of rank 1      [lo ------------------ hi)
    pieces                |of 0|    own     |of 2|            outside [0, size): the fill

With P the matrix that copies window positions from the owners (a row with one 1 for a read position, a row of
zeros for a constant) the operator is ``w = P x + c``; its gradient is ``P' g``, which is
:mod:`fxshard.ops.halo_accumulate`.  Which piece comes from where is :mod:`fxshard.window`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.lowering import define, differentiate
from fxshard.ops.memory import check_size, empty_like_order, join, memory_order, with_size
from fxshard.ops.recipe import Recipe, halo_recipe
from fxshard.ops.wire import Shape, swap_blocks, tied, with_token
from fxshard.window import FILLED, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SCHEMA = "(Tensor x, int dim, int[] bounds, int[] lo, int[] hi, str mode, float value, int rank, str group) -> Tensor"


@define("halo_exchange", SCHEMA)
def halo_exchange(  # noqa: PLR0913, PLR0917  the schema's arguments
    x: Tensor,
    dim: int,
    bounds: Sequence[int],
    lo: Sequence[int],
    hi: Sequence[int],
    mode: str,
    value: float,
    rank: int,
    group: str,
) -> Tensor:
    """Return this rank's window.

    Args:
        x: What this rank owns, ``[bounds[rank], bounds[rank + 1])`` of ``dim``.
        dim: The dimension that is split, not negative.
        bounds: Who owns what, ``n + 1`` integers.
        lo: For each rank, where its window begins; may be outside ``[0, size)``.
        hi: For each rank, where its window ends.
        mode: What stands outside: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: The constant of mode ``"constant"``.
        rank: This rank's place in ``group``.
        group: The name of the process group.

    Returns:
        A new tensor with ``hi[rank] - lo[rank]`` positions in ``dim`` and the memory format of ``x``.

    Raises:
        FxShardError: The arguments do not fit ``x``.
    """
    recipe = halo_recipe(bounds, lo, hi, mode, value, rank)
    start = recipe.owned[0]
    check_size("halo_exchange", x, dim, recipe.owned_length, rank)
    received = _fetch(x, dim, recipe, group)
    fetched = [iter(blocks) for blocks in received]
    blocks = [x.narrow(dim, 0, 0)]
    for run in recipe.runs:
        piece = run.piece
        if piece.owner == FILLED:
            blocks.append(_constant(x, with_size(x.shape, dim, piece.count), value))
        else:
            source = next(fetched[piece.owner]) if run.travels else x.narrow(dim, piece.lo - start, piece.fetched)
            blocks.append(_as_read(source, dim, piece))
    if recipe.needs_token:
        blocks[-1] = tied(blocks[-1], received[rank][0])
    return join(blocks[1:] or blocks, dim, memory_order(x))


def _fetch(x: Tensor, dim: int, recipe: Recipe, group: str) -> list[list[Tensor]]:
    if recipe.is_local:
        return []
    start = recipe.owned[0]
    outgoing = [[x.narrow(dim, p.lo - start, p.fetched) for p in pieces] for pieces in recipe.sent]
    incoming: list[list[Shape]] = [
        [with_size(x.shape, dim, p.fetched) for p in recipe.received(r)] for r in range(len(recipe.sent))
    ]
    if recipe.needs_token:
        outgoing[recipe.rank], incoming[recipe.rank] = with_token(x, dim)
    return swap_blocks(outgoing, incoming, x, group)


def _as_read(source: Tensor, dim: int, piece: Piece) -> Tensor:
    if piece.step > 0:
        return source
    return source.flip(dim) if piece.step < 0 else source.expand(with_size(source.shape, dim, piece.count))


def _constant(x: Tensor, shape: list[int], value: float) -> Tensor:
    if x.dtype == torch.bool:
        return x.new_full(shape, value > 0)
    if not (x.is_floating_point() or x.is_complex()):  # an infinity stands for the integer that is furthest out
        limits = torch.iinfo(x.dtype)
        return x.new_full(shape, int(min(max(value, limits.min), limits.max)))
    return x.new_full(shape, value)


@halo_exchange.register_fake
def _(x: Tensor, dim: int, *args: Any) -> Tensor:
    *exchange, _ = args
    recipe = halo_recipe(*exchange)
    check_size("halo_exchange", x, dim, recipe.owned_length, recipe.rank)
    return empty_like_order(x, with_size(x.shape, dim, recipe.window_length), memory_order(x))


def _backward(grad: Tensor, *args: Any) -> Tensor:
    return torch.ops.fxshard.halo_accumulate(grad, *args)


differentiate(halo_exchange, _backward)

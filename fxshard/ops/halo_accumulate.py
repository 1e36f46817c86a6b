"""``fxshard::halo_accumulate``: bring the gradients of a window home to the owners and add them.

The adjoint of :mod:`fxshard.ops.halo_exchange`, ``P' g``.  What rank r owns is cut where a piece of any
window begins or ends; within such a run the terms are added, and the runs are joined::

    owned by rank 1        |                               |
    read by rank 0         |-------|
            rank 1         |-------------------------------|
            rank 2                                   |-----|
    runs                   |  0+1  |        1        | 1+2 |

So the interior is copied once and only borders are added.  Positions that nobody read get zero.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fxshard.ops.lowering import define, differentiate
from fxshard.ops.memory import check_size, empty_like_order, join, memory_order, with_size
from fxshard.ops.recipe import Recipe, halo_recipe
from fxshard.ops.wire import Shape, swap_blocks, tied, with_token
from fxshard.window import FILLED, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SCHEMA = (
    "(Tensor grad, int dim, int[] bounds, int[] lo, int[] hi, str mode, float value, int rank, str group) -> Tensor"
)

Term: TypeAlias = "tuple[Piece, Tensor]"


@define("halo_accumulate", SCHEMA)
def halo_accumulate(  # noqa: PLR0913, PLR0917  the schema's arguments
    grad: Tensor,
    dim: int,
    bounds: Sequence[int],
    lo: Sequence[int],
    hi: Sequence[int],
    mode: str,
    value: float,
    rank: int,
    group: str,
) -> Tensor:
    """Return the gradient of what this rank owns.

    Args:
        grad: The gradient of this rank's window, ``[lo[rank], hi[rank])`` of ``dim``.
        dim: As in :func:`fxshard.ops.halo_exchange.halo_exchange`, like all that follow.
        bounds: Who owns what.
        lo: Where the windows begin.
        hi: Where they end.
        mode: What stands outside.
        value: The constant, of which the gradient is dropped.
        rank: This rank's place in ``group``.
        group: The name of the process group.

    Returns:
        A new tensor with ``bounds[rank + 1] - bounds[rank]`` positions in ``dim`` and the memory format of
        ``grad``.  The terms of a position are added in the order of the ranks that read it.

    Raises:
        FxShardError: The arguments do not fit ``grad``.
    """
    recipe = halo_recipe(bounds, lo, hi, mode, value, rank)
    check_size("halo_accumulate", grad, dim, recipe.window_length, rank)
    kept, travelling = _cut(grad, dim, recipe)
    received = _send_home(travelling, grad, dim, recipe, group)
    home = [list(zip(pieces, got, strict=False)) for pieces, got in zip(recipe.sent, received, strict=True)]
    home[rank] = [*home[rank], *kept]
    runs = _runs([term for terms in home for term in terms], recipe.owned, grad, dim)
    if recipe.needs_token:
        runs[0] = tied(runs[0], received[rank][0])
    return join(runs, dim, memory_order(grad))


def _cut(grad: Tensor, dim: int, recipe: Recipe) -> tuple[list[Term], list[list[Tensor]]]:
    """Cut the gradient into what stays on this rank, and for each rank what goes there."""
    kept: list[Term] = []
    travelling: list[list[Tensor]] = [[] for _ in recipe.sent]
    start = 0
    for run in recipe.runs:
        piece = run.piece
        if piece.owner != FILLED:
            block = _as_owned(grad.narrow(dim, start, piece.count), dim, piece)
            if run.travels:
                travelling[piece.owner].append(block)
            else:
                kept.append((piece, block))
        start += piece.count
    return kept, travelling


def _as_owned(block: Tensor, dim: int, piece: Piece) -> Tensor:
    if piece.step > 0:
        return block
    return block.flip(dim) if piece.step < 0 else block.sum(dim, keepdim=True, dtype=block.dtype)


def _send_home(
    travelling: list[list[Tensor]], grad: Tensor, dim: int, recipe: Recipe, group: str
) -> list[list[Tensor]]:
    if recipe.is_local:
        return [[] for _ in recipe.sent]
    shapes: list[list[Shape]] = [[with_size(grad.shape, dim, p.fetched) for p in pieces] for pieces in recipe.sent]
    if recipe.needs_token:
        travelling[recipe.rank], shapes[recipe.rank] = with_token(grad, dim)
    return swap_blocks(travelling, shapes, grad, group)


def _runs(terms: list[Term], owned: tuple[int, int], grad: Tensor, dim: int) -> list[Tensor]:
    ends = {*owned, *(piece.lo for piece, _ in terms), *(piece.hi for piece, _ in terms)}
    runs = [_sum_over(terms, interval, grad, dim) for interval in pairwise(sorted(ends))]
    return runs or [grad.narrow(dim, 0, 0)]


def _sum_over(terms: list[Term], interval: tuple[int, int], grad: Tensor, dim: int) -> Tensor:
    lo, hi = interval
    parts = [b.narrow(dim, lo - piece.lo, hi - lo) for piece, b in terms if piece.lo <= lo and hi <= piece.hi]
    if not parts:
        return grad.new_zeros(with_size(grad.shape, dim, hi - lo))
    return reduce(torch.add, parts)


@halo_accumulate.register_fake
def _(grad: Tensor, dim: int, *args: Any) -> Tensor:
    *exchange, _ = args
    recipe = halo_recipe(*exchange)
    check_size("halo_accumulate", grad, dim, recipe.window_length, recipe.rank)
    return empty_like_order(grad, with_size(grad.shape, dim, recipe.owned_length), memory_order(grad))


def _backward(grad: Tensor, *args: Any) -> Tensor:
    *most, _, rank, group = args
    return torch.ops.fxshard.halo_exchange(grad, *most, 0.0, rank, group)  # the linear part: its constant is zero


differentiate(halo_accumulate, _backward)

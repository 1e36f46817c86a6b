"""Which meshes, and which ways to split an image over one, a planner tries.

Of the meshes of k axes the one with the shortest borders is tried: with a_i ranks along a dimension of size S_i, a rank
has borders in proportion to::

    a_1 / S_1 + ... + a_k / S_k          columns at a border, over columns
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH, FIRST_SPATIAL = 0, 2
"""Dimensions of an image: (N, C, then what is spatial)."""


def mesh_shapes(ranks: int, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a mesh that are worth trying: of each number of axes the one with the shortest borders.

    Args:
        ranks: How many share an image.
        shape: Of the whole image.

    Returns:
        Ranks on each axis; one axis first.

    Example:
        >>> mesh_shapes(8, (1, 3, 64, 64)), mesh_shapes(1024, (7, 3, 512, 8192)), mesh_shapes(7, (1, 3, 64, 64))
        (((8,), (2, 4)), ((1024,), (8, 128)), ((7,),))
        >>> mesh_shapes(64, (1, 1, 192, 192, 192))
        ((64,), (8, 8), (4, 4, 4))
    """
    sizes = sorted(shape[FIRST_SPATIAL:])
    found: list[tuple[int, ...]] = [(ranks,)]
    for axes in range(2, len(sizes) + 1):
        largest = shape[FIRST_SPATIAL:] if axes == len(sizes) else sizes[-axes:]
        meshes = [m for m in _factored(ranks, axes) if all(a <= s for a, s in zip(m, largest, strict=True))]
        if meshes:
            found.append(min(meshes, key=lambda m: sum(a / s for a, s in zip(m, largest, strict=True))))
    return tuple(found)


def _factored(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write ``ranks`` as a product of so many factors, 2 or more."""
    if axes == 1:
        yield from [(ranks,)] if ranks > 1 else []
        return
    for first in range(2, ranks + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _factored(ranks // first, axes - 1))


def splits(shape: Sequence[int], mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the dimensions that the axes of a mesh can split, one for each axis: spatial ones, or the batch.

    An axis of more ranks than another splits no smaller dimension than that does, and of axes that could change places
    the first splits the first dimension.

    Args:
        shape: Of the whole image.
        mesh_shape: Ranks on each axis.

    Example:
        >>> splits((7, 3, 512, 8192), (4,)), splits((7, 3, 512, 8192), (2, 64)), splits((1, 3, 64, 64), (2, 2))
        ([(2,), (3,), (0,)], [(2, 3), (0, 2), (0, 3)], [(2, 3)])
    """
    dims = [*range(FIRST_SPATIAL, len(shape)), BATCH]
    ways = itertools.permutations(dims, len(mesh_shape))
    return [way for way in ways if _fits(shape, way, mesh_shape)]


def _fits(shape: Sequence[int], way: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    if any(shape[dim] < ranks for dim, ranks in zip(way, mesh_shape, strict=True)):
        return False
    axes = list(zip(mesh_shape, (shape[dim] for dim in way), way, strict=True))
    return not any(_is_turned(one, other) for one, other in itertools.combinations(axes, 2))


def _is_turned(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Return whether two axes, with ranks, size and dimension, are better the other way around, or the same."""
    (ranks, size, dim), (other_ranks, other_size, other_dim) = one, other
    if ranks == other_ranks or size == other_size:
        return dim > other_dim
    return (ranks > other_ranks) != (size > other_size)

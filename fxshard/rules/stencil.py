"""What convolutions, pools and other stencils share: one spatial dimension's stencil, and its row.

A rank computes the outputs whose kernel centre lies in its input interval and fetches what their
windows need; the local operator then runs without padding on the split dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.layout import Fill, Replicate, Shard, Window
from fxshard.rules.rule import Gather
from fxshard.window import Exchange, Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.values import NodePlan


def per_dim(value: Sequence[int], dims: int) -> list[int]:
    """Return an operator's size argument with one entry for each spatial dimension.

    Example:
        >>> per_dim([3], 2)
        [3, 3]
    """
    return list(value) * dims if len(value) == 1 else list(value)


def holding(shard: Shard, window: Window) -> Shard:
    """Return ``shard`` with each rank holding ``window``; the same shard where that is what it owns."""
    if Exchange(shard.bounds, window).is_identity:
        return shard.owned
    return Shard(shard.dim, shard.bounds, held=window)


def stencil_shards(shard: Shard, stencil: Stencil, out_size: int, fill: Fill = Fill()) -> tuple[Shard, Shard] | Gather:
    """Return how input and output of a stencil along one split dimension are placed.

    Args:
        shard: How the input is split.
        stencil: The stencil along that dimension.
        out_size: The output's global size there.
        fill: What the operator sees outside the image.

    Returns:
        ``(input with its window, output)``, or why it has to be gathered.
    """
    if shard.outer != 1:
        return Gather("the split dimension is a flattened one")
    bounds = stencil.output_bounds(shard.bounds, out_size)
    if bounds is None:
        return Gather(f"{out_size} output columns for {shard.ranks} ranks")
    return holding(shard, stencil.input_window(bounds, fill)), Shard(shard.dim, bounds)


def split_dims(plan: NodePlan, position: int = 0) -> set[int]:
    """Return the dimensions of one input that some mesh axis splits."""
    return {p.dim for p in plan.inputs[position] if isinstance(p, Shard)}


def unpadded(padding: Sequence[int], plan: NodePlan, first_dim: int) -> list[int]:
    """Return ``padding`` with 0 on split dimensions: their padding is in the fetched window.

    Args:
        padding: One entry for each spatial dimension.
        plan: The call's plan; its first input is the image.
        first_dim: The image's first spatial dimension.
    """
    split = split_dims(plan)
    return [0 if first_dim + i in split else p for i, p in enumerate(padding)]


def replicas(count: int) -> tuple[Replicate, ...]:
    """Return ``Replicate`` for ``count`` inputs."""
    return (Replicate(),) * count

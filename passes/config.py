"""What the passes are told: the mesh, the user's options, and whose graph it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fxshard.emitter import Rank
    from fxshard.layout import Layout


@dataclass(frozen=True)
class Config:
    """Options of one compilation.

    Args:
        mesh_shape: Ranks on each mesh axis.
        dims: The tensor dimension that each mesh axis splits in image-like inputs; None lets the planner choose,
            -1 replicates on that axis.
        rank: Whose local graph is made; None while nobody's is (planning needs none).
        inner_backend: The Dynamo backend that compiles the local graph.
        rng: "match": draws equal the untouched model's in eager mode; "counter": each rank makes its part.
        parts: The layout of each graph input of which a rank passes its part, by the input's number.
        local_outputs: Whether outputs that are split leave the graph split.
        piece: Whether the graph may be a piece of a model, which need not have an image.
        bucket_cap_mb: When an all-reduce of gradients is full, in MiB.
        reduce_dtype: What gradients are summed in; None for each parameter's own type.
        check_every: Calls from one comparison of what the ranks hold to the next; 0 for none.
        kernels: Whether fxshard's own kernels run where they were measured to be faster.
        mode: Of Inductor: "default", or "reduce-overhead" for CUDA graphs.
        memory_budget: The part of what would be kept for the backward that may be; the rest is computed again.
        whole: The nodes that every rank runs whole although they could be split, by name, and why.
        whole_modules: Patterns of paths of modules that run so.
    """

    mesh_shape: tuple[int, ...]
    dims: tuple[int, ...] | None
    rank: Rank | None
    inner_backend: str = "inductor"
    rng: str = "match"
    parts: tuple[tuple[int, Layout], ...] = ()
    local_outputs: bool = False
    piece: bool = False
    bucket_cap_mb: float = 25.0
    reduce_dtype: torch.dtype | None = None
    check_every: int = 0
    kernels: bool = False
    mode: str = "default"
    memory_budget: float = 1.0
    whole: tuple[tuple[str, str], ...] = ()
    whole_modules: tuple[str, ...] = ()

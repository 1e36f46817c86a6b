"""Lookups by index tensors, where the positions that they name are not split.

::

    x[:, i]          i replicated, x split over W: the same lookup in every rank's columns
    table[i]         i split, the table whole: each rank looks up what its indices say
    gather, scatter  along another dimension than the split one: x, index and source alike
    x[..., [0, 2]]   indices that are written in the program, along the split dimension: slices, joined

Where the positions depend on data and the dimension that they name is split, any rank may need any column: the
map is gathered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.pointwise import aligned, leading_shard
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
MOST_RUNS = 8
"""How many slices an indexed split dimension is worth; with more the map is gathered."""
ON_DATA = "positions in the split dimension depend on data"
SAME_VALUES = (aten.lift_fresh_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)


def index_runs(indices: Sequence[int]) -> Iterator[range]:
    """Cut indices into the longest runs of equal steps, from the front.

    Example:
        >>> list(index_runs((0, 2, 4, 3, 3)))
        [range(0, 6, 2), range(3, 4), range(3, 4)]
    """
    start = 0
    while start < len(indices):
        first, *rest = indices[start:]
        step = (rest[0] - first or 1) if rest else 1
        count = 1
        while count <= len(rest) and rest[count - 1] == first + step * count:
            count += 1
        yield range(first, first + step * count, step)
        start += count


def written_indices(node: Node, size: int) -> list[int] | None:
    """Return the indices, below ``size``, of a one-dimensional index that the program has; None where it is data."""
    while node.target in SAME_VALUES:
        (node,) = node.all_input_nodes
    if node.op != "get_attr":
        return None
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.ndim != 1 or value.dtype == torch.bool:
        return None
    return [int(i) % size for i in value.tolist()]


def _along_split(x: Node, dim: int, index: Node) -> Choice:
    """Take written indices of the split dimension as slices."""
    indices = written_indices(index, tensor_value(x).shape[dim])
    if indices is None:
        return Gather(ON_DATA)
    runs = list(index_runs(indices))
    if not 0 < len(runs) <= MOST_RUNS:
        return Gather(f"indices in the split dimension make {len(runs)} slices, {MOST_RUNS} are worth it")

    def program(x: Tensor, *args: Any) -> Tensor:
        return torch.cat([_taken(x, dim, run) for run in runs], dim)

    return Expand(program)


def _taken(x: Tensor, dim: int, run: range) -> Tensor:
    if run.step > 0:
        return aten.slice.Tensor(x, dim, run[0], run[-1] + 1, run.step)
    return aten.slice.Tensor(x, dim, run[-1], run[0] + 1, -run.step).flip(dim)


class _Lookup:
    """Where the dimensions of ``x[indices]`` come from.

    Args:
        call: A call with arguments ``self`` and ``indices``.
    """

    def __init__(self, call: OpCall) -> None:
        indices = list(call["indices"])
        self.tensors = {d: tensor_value(i) for d, i in enumerate(indices) if isinstance(i, Node)}
        self.dims = list(self.tensors)
        self.is_mask = any(t.dtype in (torch.bool, torch.uint8) for t in self.tensors.values())
        self.shapes = [tuple(t.shape) for t in self.tensors.values()]
        self.shape = tuple(torch.broadcast_shapes(*self.shapes))
        """The shape of the indices, broadcast."""
        together = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.first = self.dims[0] if together else 0
        """Where their dimensions are in the result."""

    def out_dim(self, dim: int) -> int:
        """Return where a dimension that is not indexed is in the result."""
        kept = sum(d not in self.tensors for d in range(dim))
        return kept + (len(self.shape) if kept >= self.first else 0)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the lookup in a tensor of ``shape``."""
        kept = [size for d, size in enumerate(shape) if d not in self.tensors]
        return (*kept[: self.first], *self.shape, *kept[self.first :])


@rule(aten.index.Tensor, nested=True)
def place_index(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Look up locally in other dimensions than the split one, or with each rank's indices in a whole table."""
    lookup, image, rest = _Lookup(call), at[0], at[1:]
    if lookup.is_mask:
        return Gather("the result's size depends on data")
    if isinstance(image, Shard):
        if image.dim not in lookup.dims:
            moved = Shard(lookup.out_dim(image.dim), image.bounds, image.outer)
            return Row((image, *(Replicate(),) * len(rest)), (moved,))
        return _along_split(call.inputs[0], image.dim, call.inputs[1]) if len(rest) == 1 else Gather(ON_DATA)
    lead = leading_shard(lookup.shapes, rest, lookup.shape)
    if lead is None:
        return Gather("no index is split along a dimension of the result")
    wanted = [aligned(shape, lead, lookup.shape) for shape in lookup.shapes]
    return Row((image, *wanted), (Shard(lookup.first + lead.dim, lead.bounds, lead.outer),))


@rule(aten.index_put.default, nested=True)
def place_index_put(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write locally in other dimensions than the split one; a masked constant is a choice of each element."""
    lookup, image = _Lookup(call), at[0]
    if lookup.is_mask:
        is_choice = len(lookup.dims) == 1 and math.prod(call.shape(len(at) - 1)) == 1 and not call["accumulate"]
        return Expand(_masked(lookup.dims[0])) if is_choice else Gather("the number of positions depends on data")
    if not isinstance(image, Shard):
        return Gather("the target is not split")
    if image.dim in lookup.dims:
        return Gather(ON_DATA)
    out_shape = lookup.out_shape(call.shape(0))
    moved = Shard(lookup.out_dim(image.dim), image.bounds, image.outer)
    values = aligned(call.shape(len(at) - 1), moved, out_shape)
    return Row((image, *(Replicate(),) * len(lookup.dims), values), (image,))


def _masked(first: int) -> Any:
    """Return a program that writes one value where a mask of the dimensions from ``first`` on is true."""

    def program(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
        mask = next(i for i in indices if i is not None)
        shaped = mask.reshape(mask.shape + (1,) * (x.ndim - first - mask.ndim)) != 0
        return torch.where(shaped, values.reshape(()).to(x.dtype), x)

    return program


@rule(aten.index_select.default, nested=True)
def place_index_select(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Select locally in other dimensions, or with each rank's indices in a whole tensor."""
    image, index = at
    dim = call["dim"] % len(call.shape(0))
    if isinstance(image, Shard) and image.dim == dim:
        return _along_split(call.inputs[0], dim, call.inputs[1])
    if isinstance(image, Shard):
        return Row((image, Replicate()), (image,))
    assert isinstance(index, Shard)
    return Row((image, index), (Shard(dim, index.bounds, index.outer),))


def _place_alike(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Split all inputs alike along another dimension than the indexed one."""
    lead = next(p for p in at if isinstance(p, Shard))
    sizes = {call.shape(i)[lead.dim] for i in range(len(at)) if lead.dim < len(call.shape(i))}
    if lead.dim == call["dim"] % max(len(call.shape(0)), 1):
        return Gather(ON_DATA)
    if len(sizes) != 1:
        return Gather(f"the inputs have sizes {sorted(sizes)} in the split dimension")
    return Row((lead,) * len(at), (lead,))


@rule(aten.gather.default, nested=True)
def place_gather(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Look up in the same rows of both, or with each rank's indices in a whole tensor."""
    image, index = at
    if isinstance(index, Shard) and isinstance(image, Replicate) and index.dim == call["dim"] % len(call.shape(0)):
        return Row(at, (index,))
    return _place_alike(call, at)


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    nested=True,
)
def place_scatter(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write into the same rows of all inputs."""
    return _place_alike(call, at)


@rule(
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    nested=True,
)
def place_index_write(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write whole slices at the same indices in each rank's columns."""
    dim, rank = call["dim"] % len(call.shape(0)), len(call.shape(0))
    lead = next((p for i, p in enumerate(at) if isinstance(p, Shard) and len(call.shape(i)) == rank), None)
    if lead is None or lead.dim == dim:
        return Gather(ON_DATA)
    named = call.positions["index"][0]
    wanted = [lead if i != named and len(call.shape(i)) == rank else Replicate() for i in range(len(at))]
    return Row(tuple(wanted), (lead,))


@rule(aten.embedding.default, nested=True)
def place_embedding(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Look up each rank's indices in the whole table, if its gradient is the sum of the ranks' dense ones."""
    table, indices = at
    if call["sparse"]:
        return Gather("its gradient is sparse")
    if call["scale_grad_by_freq"] and isinstance(indices, Shard):
        return Gather("its gradient is scaled by how often an index is in the whole batch")
    if isinstance(indices, Shard):
        return Row((Replicate(), indices), (indices,))
    assert isinstance(table, Shard)
    if table.dim == 0:
        return Gather(ON_DATA)
    return Row((table, indices), (Shard(len(call.out_shape) - 1, table.bounds, table.outer),))


@rule(aten.embedding_bag.default, aten.embedding_bag.padding_idx, nested=True)
def place_embedding_bag(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Keep it whole: the operators that ATen makes of it have no gradient."""
    return Gather("a bag may have indices of any position")


@rule(aten.one_hot.default, emit=lambda *a: _emit_one_hot(*a), nested=True)
def place_one_hot(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Add a dimension of classes that is not split."""
    return Row(at, at)


def _emit_one_hot(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    args, kwargs = call.rebind(inputs, num_classes=call.out_shape[-1])
    return emitter.call(call.op, *args, **kwargs)


@rule(aten.diagonal.default, nested=True)
def place_diagonal(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave a split of another dimension than the two of the diagonal."""
    (shard,) = at
    assert isinstance(shard, Shard)
    pair = {call[name] % len(call.shape(0)) for name in ("dim1", "dim2")}
    if shard.dim in pair:
        return Gather("the diagonal runs along the split dimension")
    return Row(at, (Shard(shard.dim - sum(d < shard.dim for d in pair), shard.bounds, shard.outer),))

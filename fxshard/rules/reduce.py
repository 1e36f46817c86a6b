"""Reductions: over other dimensions they are local, over a split one they leave a term on each rank.

    sum, nansum, count_nonzero   partial sums                           -> Partial(sum)
    mean                         partial sums over the global count     -> Partial(sum)
    prod                         the product of the ranks' products     -> Replicate
    logsumexp                    log(sum(exp(x - m))) + m               m the extremum of all ranks

Values of 16 bits are accumulated in float32.  Variances are in :mod:`fxshard.rules.moments`, maxima in
:mod:`fxshard.rules.extremum`, norms in :mod:`fxshard.rules.vector_norm`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Layout, Partial, Placement, Replicate, Shard
from fxshard.rules.rule import Choice, Expand, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten
LOW_PRECISION = (torch.bfloat16, torch.float16)


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """Return the dimensions that the call reduces.

    An empty list of them is all for most operators and none for ``any`` and ``all``: the shape of the result says it.
    """
    rank = len(call.shape(0))
    dims = call.arguments.get("dim")
    if isinstance(dims, int):
        return (dims % rank,)
    if dims:
        return tuple(d % rank for d in dims)
    nothing = dims is not None and call.out_shape == call.shape(0)
    return () if nothing else tuple(range(rank))


def named_dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions that an argument names, for a reduction that takes all where it names none.

    Example:
        >>> x = torch.empty(2, 3)
        >>> named_dims(x, None), named_dims(x, []), named_dims(x, 0), named_dims(x, (1,))
        ([0, 1], [0, 1], [0], [1])
    """
    if isinstance(dim, int):
        return [dim]
    return list(dim) if dim else list(range(x.ndim))


def surviving(shard: Shard, dims: Sequence[int], *, keepdim: bool) -> Shard:
    """Return the split of the output of a reduction over other dimensions than the split one."""
    dropped = 0 if keepdim else sum(d < shard.dim for d in set(dims))
    return Shard(shard.dim - dropped, shard.bounds, shard.outer)


def local_reduction(call: OpCall, at: tuple[Placement, ...]) -> Row | None:
    """Return the row of a reduction that leaves the split dimension alone, None where it reduces it."""
    (shard,) = at
    assert isinstance(shard, Shard)
    dims = reduced_dims(call)
    if shard.dim in dims:
        return None
    kept = surviving(shard, dims, keepdim=bool(call.arguments.get("keepdim")))
    return Row(at, (kept,) * len(call.output_values))


def reduced_axes(layout: Layout, dims: Sequence[int]) -> list[tuple[int, Shard]]:
    """Return ``(axis, shard)`` for each mesh axis that splits one of ``dims``."""
    return [(axis, shard) for dim in sorted(set(dims)) for axis, shard in layout.shards(dim)]


def rank_table(emitter: Emitter, x: Node, axis: int, ranks: int) -> Node:
    """Emit the stack of the ranks' values along one mesh axis, ``(ranks, *x.shape)``; each gets its own gradient."""
    one_each = Shard(0, tuple(range(ranks + 1)))
    return emitter.all_gather(emitter.call(aten.unsqueeze.default, x, 0), axis, one_each)


def wide(x: Tensor) -> Tensor:
    """Return 16-bit values in float32, others as they are.

    Example:
        >>> wide(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in LOW_PRECISION else x


def is_low_precision(call: OpCall) -> bool:
    """Return whether the first output has 16 bits."""
    value = call.output_values[0]
    return value is not None and value.dtype in LOW_PRECISION


def in_float32(call: OpCall) -> Expand:
    """Return the call with the image in float32, its floating results brought back to 16 bits."""
    op, dtypes = call.op, [v.dtype for v in call.output_values if v is not None]

    def program(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") in LOW_PRECISION:
            kwargs["dtype"] = torch.float32
        results = op(x.float(), *args, **kwargs)
        if isinstance(results, torch.Tensor):
            return results.to(dtypes[0])
        return tuple(r.to(dtype) for r, dtype in zip(results, dtypes, strict=True))

    return Expand(program)


@rule(aten.sum.default, aten.sum.dim_IntList, nested=True)
def place_sum(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Leave partial sums where the split dimension is summed."""
    row = local_reduction(call, at)
    if row is not None:
        return row
    return in_float32(call) if is_low_precision(call) else Row(at, (Partial(),))


@rule(aten.mean.default, aten.mean.dim, emit=lambda *a: _emit_mean(*a), nested=True)
def place_mean(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum and divide by the global count."""
    return place_sum(call, at)


def _emit_mean(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    dims, dtype = reduced_dims(call), call["dtype"]
    if not any(isinstance(p, Partial) for p in plan.outputs[0]):
        args, kwargs = call.rebind(inputs)
        return emitter.call(call.op, *args, **kwargs)
    keepdim = bool(call.arguments.get("keepdim"))
    total = emitter.call(aten.sum.dim_IntList, inputs[0], list(dims), keepdim, dtype=dtype)
    return emitter.call(aten.div.Scalar, total, float(math.prod(call.shape(0)[d] for d in dims)))


@rule(aten.nansum.default, nested=True)
def place_nansum(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum with zeros in the place of NaN."""
    if call["dim"] in (None, []):  # torch 2.11's fake result has the wrong shape: the program says the right one
        return Expand(_nansum)
    return local_reduction(call, at) or Expand(_nansum)


def _nansum(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return x.masked_fill(x.isnan(), 0).sum(named_dims(x, dim), keepdim, dtype=dtype)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, nested=True)
def place_count(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum over what is not zero."""
    return local_reduction(call, at) or Expand(_count_nonzero)


def _count_nonzero(x: Tensor, dim: list[int] | int | None = None) -> Tensor:
    return (x != 0).sum(named_dims(x, dim))


@rule(aten.logsumexp.default, nested=True)
def place_logsumexp(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Sum exponentials of what is left of the maximum over all ranks."""
    return local_reduction(call, at) or Expand(_logsumexp)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    values = wide(x) if x.is_floating_point() else x.to(torch.get_default_dtype())
    dim = named_dims(x, dim)
    most = values.detach().amax(dim, keepdim=True)
    most = most.masked_fill(most.isinf(), 0)
    kept = (values - most).exp().sum(dim, keepdim=True).log() + most
    kept = kept if x.dtype not in LOW_PRECISION else kept.to(x.dtype)
    return kept if keepdim else kept.squeeze(dim)


@rule(aten.prod.default, aten.prod.dim_int, emit=lambda *a: _emit_product(*a), nested=True)
def place_product(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Multiply the ranks' products; autograd of the last product knows about zeros."""
    row = local_reduction(call, at)
    if row is not None:
        return row
    return in_float32(call) if is_low_precision(call) else Row(at, (Replicate(),))


def _emit_product(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    args, kwargs = call.rebind(inputs)
    product = emitter.call(call.op, *args, **kwargs)
    for axis, shard in reduced_axes(plan.inputs[0], reduced_dims(call)):
        product = emitter.call(aten.prod.dim_int, rank_table(emitter, product, axis, shard.ranks), 0)
    return product

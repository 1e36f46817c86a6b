"""Gradient buckets: one all-reduce sums the gradients of many parameters while the backward goes on.

A bucket is two identities in the forward.  Its *sum* stands where the first of its values is used and its *settling*
stands first in the graph, so that in the backward the one runs as soon as the gradients are there and the other last::

    forward     w, b -- settle --> w, b, token -- sum --> w, b --> work that is split over the ranks
    backward    w, b <-- settle <-- token <------ sum <-- w, b

                wait, cut the sum     the gradient of     join the gradients,
                into gradients        the token           start the all-reduce

The all-reduce that was started travels as the gradient of the *token*, a tensor of the bucket's length without memory,
so nothing is shared between the two but what autograd hands on.  The gradients are views of the sum.  Where a second
derivative is asked for (``create_graph=True``), the sum is waited for at once and is differentiable.

The order of what is joined is each value's memory order, so a channels_last weight has a channels_last gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.lowering import failures_told
from fxshard.ops.memory import inverse, memory_order

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """How the gradients of some values are summed together.

    Args:
        groups: The names of the process groups to sum over, one after the other.
        dtype: What travels.
    """

    groups: tuple[str, ...]
    dtype: torch.dtype


class SettleGradients(torch.nn.Module):
    """Returns its values and a token; in the backward it waits for the sum and cuts it.

    Args:
        bucket: How the gradients are summed.

    Example:
        >>> *_, token = SettleGradients(Bucket((), torch.float32))(torch.ones(2, 3), torch.ones(4))
        >>> token.shape, token.untyped_storage().nbytes()
        (torch.Size([10]), 4)
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return ``values`` and the token, of as many elements as all of them."""
        made: tuple[Tensor, ...] = _Settle.apply(self.bucket, *values)
        return made


class SumGradients(torch.nn.Module):
    """Returns its values; in the backward it joins their gradients and starts the all-reduce.

    Args:
        bucket: How the gradients are summed.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, *values_and_token: Tensor) -> tuple[Tensor, ...]:
        """Return the values.

        Args:
            values_and_token: What :class:`SettleGradients` returned.
        """
        made: tuple[Tensor, ...] = _Sum.apply(self.bucket, *values_and_token)
        return made


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.like = bucket, [(v.shape, memory_order(v), v.dtype) for v in values]
        ctx.sizes = [v.numel() for v in values]
        token = values[0].new_zeros((), dtype=bucket.dtype).expand(sum(ctx.sizes))
        return (*(v.view_as(v) for v in values), token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *marks, flat = gradients
        if flat is None:
            return (None,) * (len(marks) + 1)
        if not torch.is_grad_enabled():
            with _told(ctx.bucket):
                flat = torch.ops._c10d_functional.wait_tensor(flat)
        found: list[Tensor | None] = [None]
        for mark, part, (shape, order, dtype) in zip(marks, flat.split(ctx.sizes), ctx.like, strict=True):
            whole = part.view([shape[d] for d in order]).permute(inverse(order))
            found.append(None if mark is None else whole.to(dtype))
        return tuple(found)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *values_and_token: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        *values, _ = values_and_token
        ctx.bucket, ctx.like = bucket, [(v.shape, memory_order(v)) for v in values]
        ctx.device = values[0].device
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in gradients):
            return (None,) * (len(gradients) + 2)
        bucket = ctx.bucket
        with _told(bucket):
            like = zip(gradients, ctx.like, strict=True)
            flat = torch.cat([_flat(g, shape, order, bucket, ctx.device) for g, (shape, order) in like])
            summed = _differentiable_sum(flat, bucket) if torch.is_grad_enabled() else _sum(flat, bucket)
        # what tells the settling which values have a gradient
        marks = [None if g is None else g.new_zeros(()).expand(g.shape) for g in gradients]
        return (None, *marks, summed)


def _told(bucket: Bucket) -> AbstractContextManager[None]:
    """Return a context that tells what is raised; nobody, of a bucket that is summed over no ranks."""
    return failures_told(bucket.groups[-1] if bucket.groups else "")


def _flat(
    gradient: Tensor | None, shape: torch.Size, order: tuple[int, ...], bucket: Bucket, device: torch.device
) -> Tensor:
    """Return a gradient as it travels; zeros of a value that has none, because the other values' places are fixed."""
    if gradient is None:
        return torch.zeros(shape.numel(), dtype=bucket.dtype, device=device)
    return gradient.permute(order).reshape(-1).to(bucket.dtype)


def _sum(flat: Tensor, bucket: Bucket) -> Tensor:
    """Start the sum over the last group; it is waited for when it is settled."""
    for group in bucket.groups[:-1]:
        flat = torch.ops._c10d_functional.all_reduce(flat, "sum", group)
        flat = torch.ops._c10d_functional.wait_tensor(flat)
    return torch.ops._c10d_functional.all_reduce(flat, "sum", bucket.groups[-1])


def _differentiable_sum(flat: Tensor, bucket: Bucket) -> Tensor:
    for group in bucket.groups:
        flat = torch.ops.fxshard.all_reduce(flat, "sum", group)
    return flat

"""Faults to plant in fxshard, each of a kind that has been made by hand, and a network in which each shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.emitter import Emitter
from fxshard.layout import Fill
from fxshard.ops import gradient_bucket
from fxshard.passes.lower import lower
from fxshard.rules import moments, norm, pool, registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node

    from fxshard.layout import Shard, Window

aten = torch.ops.aten


class Net(nn.Module):
    """One layer of each kind, on (N, 3, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 7, stride=2, padding=3), nn.BatchNorm2d(4)
        self.body, self.groups = nn.Conv2d(4, 4, 5, padding=2), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        x = F.max_pool2d(x - 9, 3, 2, 1)
        x = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        x = self.groups(F.gelu(self.body(x)))
        x = F.dropout(x, 0.3)
        x = x * torch.softmax(x, -1)
        x = x + x.cummax(-1).values
        return self.head(x.mean((2, 3)))


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.randn(2, 3, 12, 32),)


def faulty() -> nn.Module:
    """Return the network in a process that has a fault from now on."""
    FAULTS["halo one column too narrow"].plant(pytest.MonkeyPatch())  # rank 1 differs first
    return Net()


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        plant: Patches fxshard in this process.
        kind: What differs first.
        op: The operator that the bisection has to name.
        line: What the line of the network has that it names.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    kind: str
    op: str
    line: str = ""


def _of_rule(op: Any, **changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(registered(), op, replace(registered()[op], **changes))


def _narrow_halo(patch: pytest.MonkeyPatch) -> None:
    """Lose the first column of what each rank but the first one gets."""
    fetch = Emitter.fetch

    def narrower(self: Emitter, x: Node, axis: int, shard: Shard, window: Window) -> Node:
        fetched = fetch(self, x, axis, shard, window)
        lo, hi = window.intervals[self.rank.coords[axis]]
        if fetched is x or not 0 < lo < shard.bounds[self.rank.coords[axis]]:
            return fetched
        kept = [0.0, *[1.0] * (hi - lo - 1)]
        return self.call(aten.mul.Tensor, fetched, self.constant(x, kept, shard.dim - x.meta["val"].ndim))

    patch.setattr(Emitter, "fetch", narrower)


def _halo_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """Keep the gradient of the columns that neighbours fetched from being sent home."""
    fetch = Emitter.fetch

    def one_way(self: Emitter, x: Node, axis: int, shard: Shard, window: Window) -> Node:
        fetched = fetch(self, x, axis, shard, window)
        if fetched is x or fetched.target is not torch.ops.fxshard.halo_exchange.default:
            return fetched
        lo, hi = window.intervals[self.rank.coords[axis]]
        start, stop = (shard.bounds[self.rank.coords[axis] + i] for i in (0, 1))
        whole = self.call(torch.ops.fxshard.halo_exchange.default, self.call(aten.detach.default, x), *fetched.args[1:])
        own = self.call(aten.sub.Tensor, x, self.call(aten.detach.default, x))
        behind = 2 * (x.meta["val"].ndim - 1 - shard.dim)
        padded = self.call(aten.constant_pad_nd.default, own, [*[0] * behind, start - lo, hi - stop])
        return self.call(aten.add.Tensor, whole, padded)

    patch.setattr(Emitter, "fetch", one_way)


def _masks_of_the_other_rank(patch: pytest.MonkeyPatch) -> None:
    def other(self: Emitter, x: Node, axis: int, shard: Shard) -> Node:
        lo, hi = shard.interval((self.rank.coords[axis] + 1) % shard.ranks)
        return self.call(aten.slice.Tensor, x, shard.dim, lo, hi)

    patch.setattr(Emitter, "slice", other)


def _sum_of_own_terms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Emitter, "all_reduce", lambda self, x, *_: self.call(aten.clone.default, x))


def _gather_out_of_order(patch: pytest.MonkeyPatch) -> None:
    gather = Emitter.all_gather

    def mirrored(self: Emitter, x: Node, axis: int, shard: Shard) -> Node:
        found = gather(self, x, axis, shard)
        if shard.dim == 0:  # what the norms merge
            return found
        return self.call(aten.flip.default, found, [shard.dim])

    patch.setattr(Emitter, "all_gather", mirrored)


def _statistics_of_the_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moments, "_merge_moments", lambda emitter, stacked, *_: stacked)


def _biased_running_variance(patch: pytest.MonkeyPatch) -> None:
    right = norm._batch_norm

    def biased(x: Tensor, *args: Any) -> Any:
        *rest, updated = right(x, *args)
        assert updated is not None
        count = x.numel() // x.shape[1]
        return (*rest, updated * ((count - 1) / count))

    patch.setattr(norm, "_batch_norm", biased)


def _other_group_norm(patch: pytest.MonkeyPatch) -> None:
    right = norm._group_norm
    patch.setattr(norm, "_group_norm", lambda x, groups, w, b, eps, *rest: right(x, groups, w, b, 2 * eps, *rest))


def _other_inner_backend(patch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        run = lower(*args, **kwargs)
        return lambda *inputs: [1.001 * x for x in run(*inputs)]

    patch.setattr("fxshard.backend.lower", other)


def _bucket_of_own_terms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        gradient_bucket, "_sum", lambda flat, bucket: torch.ops._c10d_functional.all_reduce(flat, "max", *bucket.groups)
    )


FAULTS = {
    "dropped gradient sum": Fault(
        _of_rule(aten.conv2d.default, whole_gradients=True), "gradient", "input ", "self.body(x)"
    ),
    "halo one column too narrow": Fault(_narrow_halo, "value", "aten.max_pool2d.default", "F.max_pool2d"),
    "halo without a way home": Fault(_halo_without_gradient, "gradient", "aten.", "self.body(x)"),
    "wrong border fill": Fault(
        lambda patch: patch.setattr(pool, "OUTSIDE_MAX", Fill("constant", 0.0)),
        "value",
        "aten.max_pool2d.default",
        "F.max_pool2d",
    ),
    "batch statistics of the part": Fault(_statistics_of_the_part, "value", "", "self.norm"),
    "wrong average divisor": Fault(
        lambda patch: patch.setattr(pool, "counted", lambda stencil, *_, **__: stencil.kernel),
        "value",
        "aten.avg_pool2d.default",
        "F.avg_pool2d",
    ),
    "masks of another rank": Fault(_masks_of_the_other_rank, "value", "aten.", "F.dropout"),
    "sum of one rank's terms": Fault(_sum_of_own_terms, "value", "aten.", "torch.softmax"),
    "gather out of order": Fault(_gather_out_of_order, "value", "", "x.cummax(-1)"),
    "running variance biased": Fault(_biased_running_variance, "buffer", "aten.", "self.norm"),
    "another formula for a norm": Fault(_other_group_norm, "value", "aten.", "self.groups"),
    "another result of the inner backend": Fault(_other_inner_backend, "value", "aten.linear.default", "self.head"),
    "bucket that does not add": Fault(_bucket_of_own_terms, "gradient", "input "),
}

"""Losses inside the model: values and gradients are those of all pixels, also where a rank has none that counts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool

CLASSES = 5
REDUCTIONS = ("none", "mean", "sum")
Loss = Any


class Losses(nn.Module):
    """Losses of scores that a convolution makes."""

    def __init__(self, *losses: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.losses = losses
        self.conv = nn.Conv2d(3, CLASSES, 1)
        self.weight = nn.Parameter(torch.rand(CLASSES) + 0.5, requires_grad=False)

    def forward(self, x: Tensor, target: Tensor) -> list[Tensor]:
        scores = self.conv(x)
        return [loss(scores, target, self.weight) for loss in self.losses]


def cross_entropy(weighted: bool = False, **options: Any) -> tuple[Loss, ...]:
    return tuple(
        lambda x, t, w, r=reduction: F.cross_entropy(x, t, w if weighted else None, reduction=r, **options)
        for reduction in REDUCTIONS
    )


def dense(loss: Any, **options: Any) -> tuple[Loss, ...]:
    """The loss of the scores against others, and against what is broadcast."""
    return tuple(
        lambda x, t, w, r=reduction: loss(x, x.detach().cos() / 2, reduction=r, **options) for reduction in REDUCTIONS
    )


def bce(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), (t > 2).to(x.dtype)[:, None].expand_as(x), w[:, None, None])


def bce_with_logits(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, (t > 2).to(x.dtype)[:, None].expand_as(x), pos_weight=w[:, None, None])


def distribution(x: Tensor) -> Tensor:
    return x.detach().cos().softmax(1)


LOSSES: dict[str, tuple[Loss, ...]] = {
    "cross-entropy": cross_entropy(),
    "cross-entropy-ignore": cross_entropy(ignore_index=1),
    "cross-entropy-weight": cross_entropy(weighted=True, ignore_index=1),
    "cross-entropy-smoothing": cross_entropy(label_smoothing=0.2),
    "cross-entropy-all": cross_entropy(weighted=True, ignore_index=1, label_smoothing=0.2),
    "cross-entropy-probabilities": (
        lambda x, t, w: F.cross_entropy(x, distribution(x)),
        lambda x, t, w: F.cross_entropy(x, distribution(x), w, label_smoothing=0.1, reduction="sum"),
    ),
    "cross-entropy-volume": (lambda x, t, w: F.cross_entropy(x[:, :, None], t[:, None], w, ignore_index=1),),
    "cross-entropy-of-rows": (
        lambda x, t, w: F.cross_entropy(x.permute(0, 2, 3, 1).reshape(-1, CLASSES), t.reshape(-1), ignore_index=1),
    ),
    "nll": tuple(lambda x, t, w, r=r: F.nll_loss(x.log_softmax(1), t, w, reduction=r) for r in REDUCTIONS),
    "mse": dense(F.mse_loss),
    "l1": dense(F.l1_loss),
    "smooth-l1": dense(F.smooth_l1_loss, beta=0.3),
    "huber": dense(F.huber_loss, delta=0.3),
    "broadcast-target": (lambda x, t, w: F.mse_loss(x, w[:, None, None].expand_as(x)),),
    "soft-margin": (lambda x, t, w: F.soft_margin_loss(x, (t > 2).to(x.dtype)[:, None] * 2 - 1),),
    "binary-cross-entropy": (bce, bce_with_logits),
    "divergence": (
        lambda x, t, w: F.kl_div(x.log_softmax(1), distribution(x), reduction="batchmean"),
        lambda x, t, w: F.kl_div(x.log_softmax(1), distribution(x).log(), reduction="sum", log_target=True),
        lambda x, t, w: F.poisson_nll_loss(x, x.detach().exp(), full=True),
    ),
    "margins": (
        lambda x, t, w: F.hinge_embedding_loss(x[:, 0], (t > 2).to(x.dtype) * 2 - 1),
        lambda x, t, w: F.margin_ranking_loss(x[:, 0], x[:, 1], (t > 2).to(x.dtype) * 2 - 1, 0.2),
        lambda x, t, w: F.cosine_similarity(x, x.detach().cos(), 1).mean(),
    ),
}
MESHES = {"w-2": ((3,), (2,)), "h-3": ((2,), (3,)), "2x2": ((2, 3), (2, 2)), "n-2": ((0,), (2,))}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    target = torch.randint(2, CLASSES, (2, 7, 9))
    target[:, :, :5] = 1  # with ignore_index=1 the first ranks have nothing that counts
    target[0, :3] = 1
    return Losses(*LOSSES[name]), (torch.randn(2, 3, 7, 9), target)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_one_device(pool: RankPool, name: str, mesh: str) -> None:
    dims, shape = MESHES[mesh]
    case = Case(functools.partial(build, name), tuple(Shard(d) for d in dims), shape)
    assert_exact(pool, case)


def build_split_classes() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    class Raw(Losses):
        def forward(self, x: Tensor, target: Tensor) -> list[Tensor]:
            return [loss(x * 2, target, self.weight) for loss in self.losses]

    losses = [*LOSSES["cross-entropy-all"], *LOSSES["nll"]]
    return Raw(*losses), (torch.randn(2, CLASSES, 3, 4), torch.randint(0, CLASSES, (2, 3, 4)))


def test_classes_may_be_split(pool: RankPool) -> None:
    assert_exact(pool, Case(build_split_classes, (Shard(1),), (2,)))

"""Lookups, gathers, scatters and sliding windows: exact, and no map is gathered where the index allows it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard import backend
from fxshard.compare import Case, transformed
from fxshard.trace import build_model, cotangent_loss
from fxshard.values import plan_of
from tests.ranks.checks import assert_exact
from tests.ranks.map_models import Mapped, image, splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from fxshard.workers import RankPool

ORDER = torch.tensor([2, 0, 3])
PAIR = torch.tensor([[0, 1], [3, 3]])


def labels(x: Tensor) -> Tensor:
    """Return a class below 4 for each pixel, (2, 13, 11)."""
    return x.argmax(1)


def written(x: Tensor, where: Tensor) -> Tensor:
    y = x * 1.5
    y[:, where] = x[:, :3] * 2
    y[:, [1]] = 0.25
    y[torch.tensor([0]), :, :1] += 1
    return y


def masked(x: Tensor) -> Tensor:
    y = x * 1.5
    y[x > 0.3] = -0.5
    y[:, x[0] < -0.2] = x.mean()
    y[torch.isnan(y)] = 0
    return y


def put_along(x: Tensor) -> Tensor:
    y = x * 1.5
    y[..., labels(x)[0, 0, :2]] = x[..., :2]
    return y


TABLE: dict[str, Callable[[Tensor], Any]] = {
    "index-channels": lambda x: x[:, ORDER],
    "index-list": lambda x: x[:, [3, 1, 1]] * 2,
    "index-grid": lambda x: x[:, PAIR].sum(1),
    "index-apart": lambda x: x.transpose(1, 2)[torch.tensor([1, 0, 1]), :, ORDER],
    "index-around": lambda x: x.permute(0, 2, 1, 3)[torch.tensor([0, 1, 1]), :, ORDER].square(),
    "index-two": lambda x: x[torch.tensor([0, 1, 1]), ORDER],
    "index-table": lambda x: (x[0, :, 0, 0] * 3)[labels(x)].sin() * x[:, 0],
    "index-rows-written": lambda x: (
        x[:, :, [0, 2, 4, 6, 5, 4, 3, 12]] * x[..., [10, 9, 8, 7]][:, :, :8].sum(3, keepdim=True)
    ),
    "reflect-by-index": lambda x: x[..., [2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 8]],
    "index-select": lambda x: (
        x.index_select(1, ORDER) * x.index_select(3, torch.tensor([1, 3, 5, 7, 9])).sum((1, 3))[:, None, :, None]
    ),
    "write-channels": lambda x: written(x, ORDER),
    "write-mask": masked,
    "gather-channel": lambda x: x.gather(1, labels(x)[:, None]) + torch.take_along_dim(x, labels(x)[:, None], 1),
    "gather-whole": lambda x: x.mean((2, 3)).gather(1, labels(x).flatten(1)).sin(),
    "scatter-value": lambda x: torch.zeros(2, 4, 13, 11).scatter(1, labels(x)[:, None], 1.0) * x,
    "scatter-source": lambda x: x.scatter(1, labels(x)[:, None], x[:, :1] * 3),
    "scatter-add": lambda x: x.scatter_add(1, labels(x)[:, None], x[:, :1] * 3),
    "scatter-reduce": lambda x: x.scatter_reduce(1, labels(x)[:, None], x[:, :1] * 3, "sum"),
    "one-hot": lambda x: F.one_hot(labels(x), 4).permute(0, 3, 1, 2) * x,
    "embedding": lambda x: F.embedding(labels(x), x.mean((0, 2))[:, :3]).sum(-1) * x[:, 0],
    "index-add": lambda x: x.index_add(1, ORDER, x[:, :3] * 2).index_fill(1, torch.tensor([1]), 0.5),
    "index-copy": lambda x: x.index_copy(1, ORDER, x[:, 1:].sin()),
    "diagonal": lambda x: torch.diagonal(x[:, :2], 0, 0, 1) * 2,
    "unfold": lambda x: x.unfold(3, 3, 2).sum(1).sin(),
    "patches": lambda x: x.unfold(2, 4, 4).unfold(3, 2, 2).flatten(4).square().sum(-1),
    "unfold-channels": lambda x: x.unfold(1, 2, 1) * 2,
    "im2col": lambda x: F.unfold(x, 3, padding=1).reshape(2, 36, 13, 11).sin().sum(1),
    "im2col-strided": lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=(0, 2), stride=(3, 2)),
    "col2im": lambda x: F.fold(F.unfold(x, 3, padding=1), (13, 11), 3, padding=1),
    "col2im-strided": lambda x: F.fold(F.unfold(x, 2, stride=(2, 3)).square(), (13, 11), 2, stride=(2, 3)),
}
"""Functions of a map of shape (2, 4, 13, 11)."""


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(TABLE[name]), (image(2, 4, 13, 11),)


@pytest.mark.parametrize(("name", "placements", "mesh"), splits(TABLE))
def test_lookup_equals_one_device(pool: RankPool, name: str, placements: Any, mesh: tuple[int, ...]) -> None:
    assert_exact(pool, Case(functools.partial(build, name), placements, mesh, steps=1))


GATHERED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gather-along": (lambda x: x.gather(3, x.argsort(3)), "depend on data"),
    "select-along": (lambda x: x.index_select(3, labels(x)[0, 0]), "depend on data"),
    "put-along": (put_along, "depend on data"),
    "scatter-of-part": (lambda x: x.scatter(1, labels(x)[:, None, :, :5], 0.0), r"sizes \[5, 11\]"),
    "written-at-random": (lambda x: x[..., [0, 3, 1, 7, 2, 9, 4, 10, 8, 0, 6, 5, 1, 9, 3, 2, 8, 5]], "slices"),
    "diagonal": (lambda x: torch.diagonal(x, 0, 2, 3), "along the split"),
}


def build_gathered(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Mapped(GATHERED[name][0]), (image(2, 4, 13, 11),)


@pytest.mark.parametrize("name", GATHERED)
def test_lookup_across_ranks_is_gathered_with_its_reason(pool: RankPool, name: str) -> None:
    verdict = assert_exact(pool, Case(functools.partial(build_gathered, name), steps=1), gathers=True)
    assert re.search(GATHERED[name][1], "; ".join(verdict.reasons)), verdict.reasons


class LookedUp(nn.Module):
    """A convolution whose rounded result is looked up in a table of five rows."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(1, 1, 3, padding=1), table

    def forward(self, x: Tensor) -> Tensor:
        row = (self.conv(x)[:, 0].abs() * 4).long().clamp(0, 4)
        found: Tensor = self.table(row.flatten(0, 1) if isinstance(self.table, nn.EmbeddingBag) else row)
        return found


TABLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (lambda: nn.Embedding(5, 3, padding_idx=1), ""),
    "by-frequency": (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "how often an index is in the whole batch"),
    "sparse": (lambda: nn.Embedding(5, 3, sparse=True), "its gradient is sparse"),
    "renormed": (lambda: nn.Embedding(5, 3, max_norm=0.9, norm_type=1.0), "embedding_renorm"),
    "bag": (lambda: nn.EmbeddingBag(5, 3, mode="mean"), "a bag may have indices of any position"),
    "bag-renormed": (lambda: nn.EmbeddingBag(5, 3, mode="sum", max_norm=0.9), "a bag may have"),
}


def build_table(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return LookedUp(TABLES[name][0]()), (image(2, 1, 6, 11),)


@dataclass(frozen=True)
class Steps:
    """What two steps of training left of a table, and why something was gathered."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    table: Tensor
    reasons: str


def train_table(rank: int, case: Case, split: bool) -> Steps:
    """Train a table (in a rank process): a sparse gradient has no place in a trace."""
    reasons: list[str] = []

    def observe(planned: fx.GraphModule, *_: object) -> None:
        reasons.extend(plan.reason for plan in map(plan_of, planned.graph.nodes) if plan)

    backend.on_compiled.append(observe)
    model, (x,) = build_model(case)
    net, outputs, gradients = transformed(model, case) if split else model, [], []
    for _ in range(2):
        model.zero_grad()
        outputs.append(net(x))
        cotangent_loss(outputs[-1]).backward()
        gradient = model.get_parameter("table.weight").grad
        assert gradient is not None
        gradients.append(gradient.to_dense())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    backend.on_compiled.remove(observe)
    return Steps([y.detach() for y in outputs], gradients, model.state_dict()["table.weight"], "; ".join(reasons))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_trained_as_on_one_device(pool: RankPool, name: str, inner: str) -> None:
    case = Case(functools.partial(build_table, name), inner_backend=inner)
    expected = train_table(0, case, split=False)
    for found in pool.run(train_table, case, True, ranks=2):
        for ours, theirs in ((found.outputs, expected.outputs), (found.gradients, expected.gradients)):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.table, expected.table, rtol=1e-9, atol=1e-11)
        assert TABLES[name][1] in found.reasons
        assert bool(found.reasons.strip("; ")) == bool(TABLES[name][1])

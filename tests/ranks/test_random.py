"""Draws on ranks are those of one device: what is split has its part, what cannot be cut is whole or refused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from fxshard.workers import WorkerError
from tests.ranks.checks import assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

CHANNELS = 4


class Draws(nn.Module):
    """A function of the result of split work, and a layer it may use."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, CHANNELS, 3, padding=1)
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        return self.function(*self.layers, self.before(x))


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def attend(m: nn.MultiheadAttention, x: Tensor, **options: Any) -> Any:
    return m(tokens(x), tokens(x), tokens(x), **options)[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "fractional-pool": lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.7)),
    "rrelu": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    "permutation": lambda x: x[:, torch.randperm(CHANNELS)],
    "multinomial": lambda x: x.sum(2) * torch.multinomial(x.abs().flatten(1), 9).sum(),
    "poisson": lambda x: x * torch.poisson(x.abs()),
    "normal-of-tensors": lambda x: x * torch.normal(x, x.abs()),
    "alpha-dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature-alpha-dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "dropout-of-channels": lambda x: F.dropout2d(x, 0.3),
    "attention": lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), dropout_p=0.3),
}
LAYERS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "multihead": (
        partial(attend, need_weights=False),
        lambda: nn.MultiheadAttention(CHANNELS, 2, dropout=0.3, batch_first=True),
    ),
    "multihead-with-weights": (attend, lambda: nn.MultiheadAttention(CHANNELS, 2, dropout=0.3, batch_first=True)),
    "encoder": (lambda m, x: m(tokens(x)), lambda: nn.TransformerEncoderLayer(CHANNELS, 2, 8, 0.3, batch_first=True)),
    "lstm": (lambda m, x: m(x.flatten(2))[0], lambda: nn.LSTM(70, 3, 2, dropout=0.3, batch_first=True)),
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    if name in LAYERS:
        function, layer = LAYERS[name]
        model = Draws(function, layer())
    else:
        model = Draws(FUNCTIONS[name])
    return model, (torch.randn(2, 2, 7, 10),)


@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_a_draw_is_that_of_one_device(pool: RankPool, name: str) -> None:
    assert_exact(pool, Case(partial(build, name)), gathers=None)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["encoder", "rrelu"])
def test_a_draw_under_other_backends(pool: RankPool, name: str, backend: str) -> None:
    assert_exact(pool, Case(partial(build, name), inner_backend=backend), gathers=None)


def test_the_dropout_of_attention_is_cut_with_its_queries(pool: RankPool) -> None:
    verdict = assert_exact(pool, Case(partial(build, "attention"), (Shard(2),), (3,)))
    assert "fxshard.random.default" in verdict.targets


def build_gamma() -> tuple[nn.Module, tuple[Tensor]]:
    return Draws(lambda x: x * torch._standard_gamma(x.abs() + 1)), (torch.randn(2, 2, 7, 10),)


@pytest.mark.parametrize("rng", ["match", "counter"])
def test_a_draw_that_is_not_known_is_refused(pool: RankPool, rng: str) -> None:
    with pytest.raises(
        WorkerError, match=r"_standard_gamma\.default draws random numbers at .*test_random\.py"
    ) as refusal:
        pool.run(judge, [Case(build_gamma, options={"rng": rng})], ranks=2)
    assert {cause.type_name for cause in refusal.value.causes.values()} == {"PlanError"}

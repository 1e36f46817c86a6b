"""The transformed module is the model: its state, checkpoints and optimizers are those of the original."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.trace import cotangent_loss
from fxshard.workers import mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

SEED, STEPS = 5, 3


class Net(nn.Module):
    """Convolution, both kinds of normalisation, a layer-scale, drop-out and a head."""

    def __init__(self) -> None:
        super().__init__()
        # no bias before the batch norm: its gradient is rounding, which AdamW would scale up to a step
        self.stem, self.norm = nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6)
        self.mix, self.pixels = nn.Conv2d(6, 6, 5, padding=2, groups=3), nn.LayerNorm(6)
        self.gamma = nn.Parameter(torch.full((6,), 0.5))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 4)
        self.register_buffer("offset", torch.ones(6))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x)).relu()
        z = self.pixels(self.mix(y).permute(0, 2, 3, 1)) * self.gamma + self.offset
        y = y + self.drop(z.permute(0, 3, 1, 2))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd-momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.05),
}


def net(seed: int = SEED) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 10, 23, generator=generator, dtype=torch.float64)


def sharded(model: Net, ranks: int) -> Net:
    torch.compiler.reset()
    return transform(model, mesh=mesh((ranks,)), placements=[Shard(3)], inner_backend="eager")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        cotangent_loss(model(batch(step))).backward()
        optimizer.step()


@dataclass(frozen=True)
class Trained:
    """What training left.

    Args:
        model: The module's state.
        optimizer: The optimizer's state.
        output: Of the trained model in eval mode.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    output: Tensor


def trained(model: nn.Module, name: str) -> Trained:
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    with torch.no_grad():
        output = model.eval()(batch(99))
    return Trained(dict(model.state_dict()), optimizer.state_dict(), output)


def train_on_rank(rank: int, name: str, ranks: int) -> Trained:
    return trained(sharded(net(), ranks), name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_keep_ranks_bitwise_equal_and_equal_to_one_device(pool: RankPool, name: str) -> None:
    first, *others = pool.run(train_on_rank, name, 3, ranks=3)
    for other in others:
        torch.testing.assert_close(other.model, first.model, rtol=0, atol=0)
        torch.testing.assert_close(other.optimizer, first.optimizer, rtol=0, atol=0)
    expected = trained(net(), name)
    assert not torch.equal(expected.model["stem.weight"], net().stem.weight)
    torch.testing.assert_close(first.model, expected.model, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(first.optimizer, expected.optimizer, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(first.output, expected.output, rtol=1e-9, atol=1e-11)


def test_a_checkpoint_of_three_ranks_loads_into_the_original(pool: RankPool) -> None:
    checkpoint = pool.run(train_on_rank, "adamw", 3, ranks=3)[0]
    original = net(seed=SEED + 1)
    assert list(original.state_dict()) == list(checkpoint.model)
    original.load_state_dict(checkpoint.model, strict=True)
    torch.testing.assert_close(original.eval()(batch(99)), checkpoint.output, rtol=1e-9, atol=1e-11)


def resume_on_rank(rank: int, model_state: dict[str, Tensor], optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    net_on_ranks = sharded(net(seed=SEED + 1), 2)
    net_on_ranks.load_state_dict(model_state)
    optimizer = OPTIMIZERS["adamw"](net_on_ranks.parameters())
    optimizer.load_state_dict(optimizer_state)
    train(net_on_ranks, optimizer, range(STEPS, STEPS + 2))
    return dict(net_on_ranks.state_dict())


def test_a_checkpoint_of_one_device_goes_on_on_two_ranks(pool: RankPool) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer)
    resumed = pool.run(resume_on_rank, dict(model.state_dict()), optimizer.state_dict(), ranks=2)
    train(model, optimizer, range(STEPS, STEPS + 2))
    for state in resumed:
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-11)


@dataclass(frozen=True)
class Identity:
    """How a transformed module compares with its original on a rank, before and after a step."""

    keys: tuple[list[str], ...]
    same_parameters: bool
    same_buffers: bool
    same_class: bool
    original_runs_alone: bool


def names(module: nn.Module) -> list[str]:
    state = [*module.state_dict(), *(n for n, _ in module.named_parameters()), *(n for n, _ in module.named_buffers())]
    return [*state, *(n for n, _ in module.named_modules())]


def identity_on_rank(rank: int) -> Identity:
    original = net()
    transformed = sharded(original, 2)
    keys = [names(original), names(transformed)]
    cotangent_loss(transformed(batch())).backward()
    keys += [names(original), names(transformed)]
    alone = original._compiled_call_impl is None
    return Identity(
        tuple(keys),
        all(a is b for a, b in zip(original.parameters(), transformed.parameters(), strict=True)),
        all(a is b for a, b in zip(original.buffers(), transformed.buffers(), strict=True)),
        type(transformed) is Net,
        alone and bool(torch.isfinite(original(batch())).all()),
    )


def test_names_parameters_and_class_are_the_original_s(pool: RankPool) -> None:
    for found in pool.run(identity_on_rank, ranks=2):
        assert all(keys == found.keys[0] for keys in found.keys)
        assert "scratch" not in list(net().state_dict())
        assert found.same_parameters
        assert found.same_buffers
        assert found.same_class
        assert found.original_runs_alone

"""What users put around a transformed model: each training is that of one device with the whole batch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

    from fxshard.workers import RankPool

STEPS, BATCH = 3, 4
State = dict[str, Tensor]


class Net(nn.Module):
    """Without batch norm: its statistics are those of a data-parallel rank's own images, as in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.body = nn.Conv2d(3, 4, 5, 2, 2), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm(self.stem(x)))
        return self.head((x + self.body(x)).mean((2, 3)))


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 8, 22, generator=generator, dtype=dtype)
    return images, torch.randint(3, (BATCH,), generator=generator)


@dataclass
class Setup:
    """What a training runs on.

    Args:
        model: Holds the parameters.
        net: What is called.
        first: Of the images that this data-parallel rank takes.
        count: How many.
    """

    model: nn.Module
    net: nn.Module
    first: int = 0
    count: int = BATCH

    def mine(self, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        images, labels = batch(step, dtype)
        part = slice(self.first, self.first + self.count)
        return images[part], labels[part]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(images), labels)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


def plainly(setup: Setup) -> None:
    optimizer = setup.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        setup.loss(*setup.mine(step)).backward()
        optimizer.step()


def clipped(setup: Setup) -> None:
    optimizer = setup.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        setup.loss(*setup.mine(step)).backward()
        norm = nn.utils.clip_grad_norm_(setup.net.parameters(), 0.1)
        assert norm > 0.1
        optimizer.step()


def accumulated(setup: Setup) -> None:
    """Take the gradients of two halves of the own images, and tell the other ranks of the second only."""
    optimizer = setup.optimizer()
    half = setup.count // 2
    for step in range(STEPS):
        optimizer.zero_grad()
        images, labels = setup.mine(step)
        for part in (slice(0, half), slice(half, None)):
            silent = part.start == 0 and isinstance(setup.net, DistributedDataParallel)
            with setup.net.no_sync() if silent else contextlib.nullcontext():  # type: ignore[operator]
                (setup.loss(images[part], labels[part]) / 2).backward()
        optimizer.step()


def scaled(setup: Setup) -> None:
    """Train with a scaler; the second step overflows on every rank, and is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    optimizer = setup.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        images, labels = setup.mine(step)
        images = images * torch.inf if step == 1 else images
        scaler.scale(setup.loss(images, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9


def averaged(setup: Setup) -> None:
    """Keep a moving average of the parameters, and leave it in the model."""
    net = setup.net.module if isinstance(setup.net, DistributedDataParallel) else setup.net
    average, optimizer = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)), setup.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        setup.loss(*setup.mine(step)).backward()
        optimizer.step()
        average.update_parameters(net)
    assert not torch.equal(state(net)["head.weight"], state(average.module)["head.weight"])
    net.load_state_dict(average.module.state_dict())


RECIPES: dict[str, Callable[[Setup], None]] = {
    "plain": plainly,
    "clipped": clipped,
    "accumulated": accumulated,
    "scaled": scaled,
    "averaged": averaged,
}


def state(model: nn.Module) -> State:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def on_spatial_ranks(backend: str) -> Setup:
    model = build()
    return Setup(model, transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend=backend))


def with_ddp(backend: str) -> Setup:
    """Split the batch over the first axis of a 2 x 2 mesh, and the width over the second."""
    axes, model = mesh((2, 2)), build()
    net = transform(model, mesh=axes["w"], placements=[Shard(3)], inner_backend=backend)
    net = DistributedDataParallel(net, process_group=axes.get_group("h"))
    return Setup(model, net, axes.get_local_rank("h") * 2, 2)


def with_fsdp(backend: str, parts: tuple[str, ...] = (), *, whole: bool = True) -> Setup:
    """Keep half of each parameter on the ranks of the first axis, and split the width over the second."""
    axes, model = mesh((2, 2)), build()
    net = transform(model, mesh=axes["w"], placements=[Shard(3)], inner_backend=backend)
    for part in parts:
        fully_shard(net.get_submodule(part), mesh=axes["h"])
    if whole:
        fully_shard(net, mesh=axes["h"])
    assert isinstance(next(net.parameters()), DTensor)
    return Setup(net, net, axes.get_local_rank("h") * 2, 2)


SETUPS: dict[str, tuple[Callable[[str], Setup], int]] = {
    "spatial": (on_spatial_ranks, 2),
    "ddp": (with_ddp, 4),
    "fsdp": (with_fsdp, 4),
    "fsdp of parts": (partial(with_fsdp, parts=("stem", "body")), 4),
    "fsdp of all parts": (partial(with_fsdp, parts=("stem", "norm", "body", "head"), whole=False), 4),
}


def trained(setup: Setup, recipe: str) -> tuple[State, Tensor]:
    """Return the parameters after a training, and the gradient of all images in one more step, zero of others'."""
    RECIPES[recipe](setup)
    images, labels = setup.mine(STEPS, next(setup.model.parameters()).dtype)
    images.requires_grad_()
    setup.loss(images, labels).backward()
    assert images.grad is not None
    gradient = torch.zeros(BATCH, *images.shape[1:], dtype=images.dtype)
    gradient[setup.first : setup.first + setup.count] = images.grad * setup.count / BATCH
    return state(setup.model), gradient


def train_on_rank(rank: int, setup: str, recipe: str, backend: str) -> tuple[State, Tensor]:
    torch.compiler.reset()
    return trained(SETUPS[setup][0](backend), recipe)


def at_night(*row: str) -> ParameterSet:
    return pytest.param(*row, marks=pytest.mark.nightly)


def on_one_device(recipe: str) -> tuple[State, Tensor]:
    model = build()
    return trained(Setup(model, model), recipe)


@pytest.mark.parametrize(
    ("setup", "recipe", "backend"),
    [
        ("spatial", "scaled", "eager"),
        ("ddp", "accumulated", "eager"),
        ("ddp", "clipped", "aot_eager"),
        ("ddp", "averaged", "eager"),
        ("fsdp", "clipped", "eager"),
        ("fsdp of parts", "accumulated", "eager"),
        ("fsdp of all parts", "plain", "eager"),
        at_night("spatial", "clipped", "eager"),
        at_night("spatial", "accumulated", "aot_eager"),
        at_night("spatial", "averaged", "aot_eager"),
        at_night("ddp", "plain", "eager"),
        at_night("fsdp", "plain", "aot_eager"),
        at_night("fsdp of parts", "plain", "aot_eager"),
    ],
)
def test_a_training_is_that_of_one_device(pool: RankPool, setup: str, recipe: str, backend: str) -> None:
    found = pool.run(train_on_rank, setup, recipe, backend, ranks=SETUPS[setup][1])
    weights, gradient = on_one_device(recipe)
    for own, own_gradient in found:
        torch.testing.assert_close(own, found[0][0], rtol=0, atol=0)
        torch.testing.assert_close(own, weights, rtol=1e-9, atol=1e-11)
        mine = own_gradient.flatten(1).any(1)
        assert mine.sum() == BATCH // (1 if setup == "spatial" else 2)
        torch.testing.assert_close(own_gradient[mine], gradient[mine], rtol=1e-9, atol=1e-11)


def go_on(setup: Setup, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        setup.loss(*setup.mine(step)).backward()
        optimizer.step()


class Dropping(Net):
    """Drops out on a split map, and behind it on what every rank has."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(nn.functional.gelu(self.norm(self.stem(x))), 0.3, self.training)
        return self.head(nn.functional.dropout((x + self.body(x)).mean((2, 3)), 0.3, self.training))


def build_dropping() -> nn.Module:
    torch.manual_seed(0)
    return Dropping().double()


def save_on_rank(rank: int, folder: str) -> None:
    torch.compiler.reset()
    model = build_dropping()
    net = transform(model, mesh=mesh((4,)), placements=[Shard(3)], inner_backend="eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    go_on(Setup(model, net), optimizer, range(2))
    weights, moments = get_state_dict(net, optimizer)
    draws = torch.get_rng_state()
    dcp.save({"model": weights, "optimizer": moments, "draws": draws}, checkpoint_id=folder)


def resume_on_rank(rank: int, folder: str, ranks: int) -> State:
    torch.compiler.reset()
    model = build_dropping()
    net = transform(model, mesh=mesh((ranks,)), placements=[Shard(3)], inner_backend="eager")
    return resumed(model, net, folder, mesh((ranks,)).get_group())


def resumed(model: nn.Module, net: nn.Module, folder: str, group: Any = None, *, draws: bool = True) -> State:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    weights, moments = get_state_dict(net, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments, "draws": torch.get_rng_state()}
    dcp.load(loaded, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    torch.manual_seed(0)  # as in a process that has just started
    if draws:
        torch.set_rng_state(loaded["draws"])
    go_on(Setup(model, net), optimizer, range(2, 4))
    return state(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_four_ranks_goes_on_on_two_and_on_one(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(save_on_rank, folder, ranks=4)
    uninterrupted = build_dropping()
    setup = Setup(uninterrupted, uninterrupted)
    go_on(setup, torch.optim.AdamW(uninterrupted.parameters(), lr=0.01), range(4))
    on_two = pool.run(resume_on_rank, folder, 2, ranks=2)
    model, without_draws = build_dropping(), build_dropping()
    for found in [*on_two, resumed(model, model, folder)]:
        torch.testing.assert_close(found, state(uninterrupted), rtol=1e-9, atol=1e-11)
    other = resumed(without_draws, without_draws, folder, draws=False)
    assert not torch.allclose(other["head.weight"], state(uninterrupted)["head.weight"], rtol=1e-6)

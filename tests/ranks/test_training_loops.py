"""What users put before and around a training: loaders of parts, Accelerate, inference in between."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fxshard.api import transform
from fxshard.workers import mesh
from tests.ranks.test_composition import Net, Setup, State, batch, build, plainly, state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fxshard.workers import RankPool

IMAGES, EPOCHS, ROWS = 8, 2, 2
WIDTH = 22
BOUNDS = (0, 13, WIDTH)
"""Of the columns that the ranks of a row read: unlike parts."""


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """Some columns of each image in a file; the others are not read.

    Args:
        path: A NumPy file of shape (IMAGES, 3, 8, WIDTH).
        first: Of the columns.
        last: The one after them.
    """

    def __init__(self, path: Path, first: int = 0, last: int = WIDTH) -> None:
        self.images = np.load(path, mmap_mode="r")
        self.first, self.last = first, last

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        columns = self.images[index, ..., self.first : self.last].copy()
        return torch.from_numpy(columns), torch.tensor(index % 3)


def loader(columns: Columns, row: int) -> tuple[DataLoader[tuple[Tensor, Tensor]], DistributedSampler[Tensor]]:
    """Return batches of two images of this row of the mesh, and what shuffles them alike for all columns."""
    sampler: DistributedSampler[Tensor] = DistributedSampler(columns, num_replicas=ROWS, rank=row, seed=5)
    return DataLoader(columns, batch_size=2, sampler=sampler), sampler


def train_on_columns(rank: int, path: Path) -> State:
    torch.compiler.reset()
    axes, model = mesh((ROWS, 2)), build()
    net = transform(model, mesh=axes["w"], placements=[Shard(3)], inner_backend="eager", inputs="local")
    parallel = DistributedDataParallel(net, process_group=axes.get_group("h"))
    column = axes.get_local_rank("w")
    batches, sampler = loader(Columns(path, BOUNDS[column], BOUNDS[column + 1]), axes.get_local_rank("h"))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for columns, labels in batches:
            optimizer.zero_grad()
            cross_entropy(parallel(columns), labels).backward()
            optimizer.step()
    return state(model)


def train_on_whole_images(path: Path) -> State:
    """Train on one device; a batch is that of all rows of the mesh."""
    model = build()
    rows = [loader(Columns(path), row) for row in range(ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for _, sampler in rows:
            sampler.set_epoch(epoch)
        for parts in zip(*(batches for batches, _ in rows), strict=True):
            images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return state(model)


@pytest.fixture(scope="module")
def images_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "images.npy"
    images = torch.randn(IMAGES, 3, 8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.save(path, images.numpy())
    return path


def test_ranks_that_read_only_their_columns_train_as_one_device(pool: RankPool, images_file: Path) -> None:
    expected = train_on_whole_images(images_file)
    for found in pool.run(train_on_columns, images_file, ranks=4):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@contextlib.contextmanager
def started_by_torchrun(rank: int, ranks: int) -> Iterator[None]:
    """Set the variables by which Accelerate knows that there are ranks, and have it forget them at the end."""
    from accelerate.state import AcceleratorState, GradientState

    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in known.items()}):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def accelerated(rank: int, path: Path) -> tuple[State, list[float]]:
    """Train by Accelerate's loop; return the parameters, and the loss of all images of each micro-batch."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    torch.compiler.reset()
    axes, model, losses = mesh((ROWS, 2)), build(), []
    with started_by_torchrun(rank, axes.size()):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = transform(model, mesh=axes["w"], placements=[Shard(3)], inner_backend="eager")
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(model.parameters(), lr=0.01))
        assert isinstance(net, DistributedDataParallel)
        row = axes.get_local_rank("h")
        batches = prepare_data_loader(DataLoader(Columns(path), batch_size=2), num_processes=ROWS, process_index=row)
        for _ in range(EPOCHS):
            for images, labels in batches:
                with accelerator.accumulate(net):
                    loss = cross_entropy(net(images), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return state(accelerator.unwrap_model(net)), losses


def accelerated_on_one_device(path: Path) -> tuple[State, list[float]]:
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for place, (images, labels) in enumerate(DataLoader(Columns(path), batch_size=2 * ROWS)):
            loss = cross_entropy(model(images), labels)
            (loss / 2).backward()
            losses.append(loss.item())
            if place % 2:
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
                optimizer.step()
                optimizer.zero_grad()
    return state(model), losses


def test_accelerate_trains_a_transformed_model_as_one_device(pool: RankPool, images_file: Path) -> None:
    pytest.importorskip("accelerate")
    expected, losses = accelerated_on_one_device(images_file)
    for found, own in pool.run(accelerated, images_file, ranks=4):
        assert own == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class WithModes(Net):
    """Does something else in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics, self.drop = nn.BatchNorm2d(3), nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(self.statistics(x)))


def build_with_modes() -> nn.Module:
    torch.manual_seed(0)
    return WithModes().double()


def evaluated(setup: Setup) -> tuple[list[Tensor], State]:
    """Train, infer in both ways, and go on; return what was inferred and what a checkpoint of the end holds."""
    images, logits = batch(9)[0], []
    torch.manual_seed(0)
    for context in (torch.inference_mode, torch.no_grad):
        plainly(setup)
        setup.net.eval()
        with context():
            logits.append(setup.net(images).clone())
        setup.net.train()
    return logits, {name: value.clone() for name, value in setup.net.state_dict().items()}


def evaluated_on_rank(rank: int) -> tuple[list[Tensor], State]:
    torch.compiler.reset()
    model = build_with_modes()
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager")
    return evaluated(Setup(model, net))


def test_inference_between_trainings_is_that_of_one_device(pool: RankPool) -> None:
    model = build_with_modes()
    expected, weights = evaluated(Setup(model, model))
    for logits, checkpoint in pool.run(evaluated_on_rank, ranks=2):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(checkpoint, weights, rtol=1e-9, atol=1e-11)
        untouched = build_with_modes().eval()
        untouched.load_state_dict(checkpoint)
        torch.testing.assert_close(untouched(batch(9)[0]), logits[1], rtol=1e-9, atol=1e-11)

"""The loss of a map that stays split, as the README and ``help(fxshard.transform)`` say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from fxshard.workers import RankPool

WIDTH, IGNORED = 16, -100


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.GELU(), nn.Conv2d(4, 3, 1)).double()


def batch(width: int) -> tuple[Tensor, Tensor]:
    """Return images and labels, the left columns of which count less."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (2, 8, width), generator=generator)
    labels[:, ::2, :5] = IGNORED
    return torch.randn(2, 3, 8, width, generator=generator, dtype=torch.float64), labels


def loss_of(way: str, out: DTensor, labels: Tensor) -> Tensor:
    """Return the loss; ``labels`` are the whole image's."""
    spatial = out.device_mesh
    mine = labels.chunk(spatial.size(), 2)[spatial.get_rank()]
    counted = (labels != IGNORED).sum()  # in the whole batch
    ways = {
        "labels of the part": lambda: F.cross_entropy(out, DTensor.from_local(mine, spatial, [Shard(2)])),
        "labels of the whole": lambda: F.cross_entropy(
            out, distribute_tensor(labels, spatial, [Shard(2)], src_data_rank=None)
        ),
        "whole map": lambda: F.cross_entropy(out.full_tensor(), labels),
        "term of the whole loss": lambda: F.cross_entropy(out.to_local(), mine, reduction="sum") / counted,
        "mean of the part": lambda: F.cross_entropy(out.to_local(), mine),
    }
    return ways[way]()


class WithLoss(nn.Module):
    """A loss inside the module that is transformed; labels have fewer dimensions than images, and are whole."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


def inside(rank: int, width: int) -> float:
    """Return how far the gradients are from one device's (runs in a rank process)."""
    torch.compiler.reset()
    images, labels = batch(width)
    model, reference = segmenter(), segmenter()
    F.cross_entropy(reference(images), labels).backward()
    net = transform(
        WithLoss(model), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local", outputs="local"
    )
    net(images.chunk(2, 3)[rank], labels).backward()
    return error_of(model, reference)


def error_of(model: nn.Module, reference: nn.Module) -> float:
    errors = []
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        errors.append(float((p.grad - q.grad).norm() / q.grad.norm()))
    return max(errors)


def largest_error(rank: int, way: str, width: int) -> float:
    """Return how far the parameters' gradients are from one device's (runs in a rank process)."""
    torch.compiler.reset()
    images, labels = batch(width)
    model, reference = segmenter(), segmenter()
    F.cross_entropy(reference(images), labels).backward()
    net = transform(
        model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local", outputs="local"
    )
    loss_of(way, net(images.chunk(2, 3)[rank]), labels).backward()
    return error_of(model, reference)


@pytest.mark.parametrize(
    ("way", "width"),
    [
        ("labels of the part", WIDTH),
        ("labels of the whole", WIDTH),
        ("labels of the whole", WIDTH + 1),
        ("whole map", WIDTH + 1),
        ("term of the whole loss", WIDTH + 1),
    ],
)
def test_a_loss_of_a_split_map_has_one_device_s_gradients(pool: RankPool, way: str, width: int) -> None:
    assert max(pool.run(largest_error, way, width, ranks=2)) < 1e-9


def test_the_mean_of_a_part_is_no_term_of_the_loss(pool: RankPool) -> None:
    assert min(pool.run(largest_error, "mean of the part", WIDTH, ranks=2)) > 0.1


def test_a_loss_in_the_module_is_whole(pool: RankPool) -> None:
    assert max(pool.run(inside, WIDTH + 1, ranks=2)) < 1e-9

"""Normalisations take the statistics of the whole image and leave one device's buffers behind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fxshard.api import transform
from fxshard.compare import Case, compare_models
from fxshard.errors import PlanError
from fxshard.rank_process import mesh
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool

CHANNELS = 4


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, CHANNELS, 3, padding=1)


class Volume(nn.Module):
    """A normalisation of volumes, applied to the image as two slices."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.stack([x, x.cos()], 2)).mean(2)


class Pixels(nn.Module):
    """A normalisation of the last dimensions, applied to channels-last pixels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "batch-plain": lambda: nn.BatchNorm2d(CHANNELS, affine=False, eps=1e-3),
    "batch-untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "batch-3d": lambda: Volume(nn.BatchNorm3d(CHANNELS, momentum=0.3)),
    "synchronised-batch": lambda: nn.SyncBatchNorm(CHANNELS),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS),
    "instance-affine": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "instance-tracked": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True, momentum=0.2),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
    "group-plain-3d": lambda: Volume(nn.GroupNorm(CHANNELS, CHANNELS, affine=False)),
    "layer": lambda: Pixels(nn.LayerNorm(CHANNELS)),
    "layer-whole-image": lambda: nn.LayerNorm((CHANNELS, 9, 11)),
    "layer-rows": lambda: nn.LayerNorm(11, elementwise_affine=False),
    "rms": lambda: Pixels(nn.RMSNorm(CHANNELS)),
    "rms-whole-image": lambda: nn.RMSNorm((9, 11), eps=1e-4),
    "local-response": lambda: nn.LocalResponseNorm(3, alpha=0.5),
    "weight": lambda: weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
    "spectral": lambda: spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
}
MESHES = {"w-2": ((3,), (2,)), "h-3": ((2,), (3,)), "2x2": ((2, 3), (2, 2)), "n-2": ((0,), (2,))}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(conv(), NORMS[name](), nn.SiLU(), nn.Conv2d(CHANNELS, 2, 3)), (torch.randn(2, 3, 9, 11),)


def case(name: str, mesh: str, **options: Any) -> Case:
    dims, shape = MESHES[mesh]
    return Case(functools.partial(build, name), tuple(Shard(d) for d in dims), shape, **options)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(NORMS.keys() - {"synchronised-batch"}))
def test_norm_equals_one_device(pool: RankPool, name: str, mesh: str) -> None:
    assert_exact(pool, case(name, mesh))


@pytest.mark.parametrize("name", ["batch", "batch-untracked", "batch-plain", "synchronised-batch", "instance-tracked"])
def test_norm_in_eval_mode_equals_one_device(pool: RankPool, name: str) -> None:
    assert_exact(pool, case(name, "w-2", training=False))


class ReadsStatistics(nn.Module):
    """Uses the running statistics that its norm has just written: constants, as they have no history."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv(), norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.conv(x))
        read = [b for b in self.norm.buffers() if b.is_floating_point()]
        return y * read[-1].sum(), torch.stack([(b * b).sum() for b in read])


class Averages(nn.Module):
    """A norm of the user's own, with a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3))
        with torch.no_grad():
            assert isinstance(self.average, torch.Tensor)
            self.average.mul_(0.9).add_(0.1 * mean)
        return x - mean[:, None, None]


READ: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "batch-cumulative": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True),
    "own": Averages,
}


def build_reading(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return ReadsStatistics(READ[name]()), (torch.randn(2, 3, 9, 11),)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", READ)
def test_no_gradient_passes_through_running_statistics(pool: RankPool, name: str, backend: str) -> None:
    assert_exact(pool, Case(functools.partial(build_reading, name), (Shard(3),), (2,), backend))


def build_image() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS), nn.SiLU()), (torch.randn(2, 3, 9, 11),)


def difference_of_synchronised(rank: int, case: Case) -> str:
    """Compare the plain model on one device with the synchronised one over ranks."""

    def synchronised(model: nn.Module) -> nn.Module:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return transform(net, mesh=mesh(case.mesh_shape), placements=[Shard(3)], inner_backend="eager")

    found = compare_models(case, synchronised)
    return "" if found.exact() else str(found)


def test_synchronised_batch_norm_is_batch_norm(pool: RankPool) -> None:
    assert pool.run(difference_of_synchronised, Case(build_image, mesh_shape=(4,)), ranks=4) == [""] * 4


def refusal_of_wider_group(rank: int) -> str:
    """Transform for half of the ranks a norm that all of them share."""
    net = nn.SyncBatchNorm(3)
    net = transform(net, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager")
    with pytest.raises(PlanError) as refusal:
        net(torch.zeros(2, 3, 4, 8))
    return str(refusal.value)


def test_statistics_shared_beyond_the_mesh_are_refused(pool: RankPool) -> None:
    for text in pool.run(refusal_of_wider_group, ranks=2):
        assert text == (
            "SyncBatchNorm shares batch statistics with ranks [2, 3], which are not in the mesh of ranks [0, 1]; "
            "use BatchNorm, or a process_group of the mesh's ranks"
        )

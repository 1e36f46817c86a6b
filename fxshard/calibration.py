"""Measures what :class:`fxshard.devices.Device` has: what a rank's device and the links between ranks can do.

Figures are of sustained work, of the slowest rank: work that is long enough for its start not to count, and calls
without work for what a start costs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fxshard.devices import Device, Link
from fxshard.errors import PlanError
from fxshard.ops import halo_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fxshard.workers import RankPool

TIMES = 20
"""Calls of which the median counts."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much work is timed.

    Args:
        matrix: Rows and columns of a square one.
        image: (N, C, H, W) of what is convolved.
        copied: Bytes of what is copied.
        summed: Bytes of an all-reduce that is all bytes.
    """

    matrix: int
    image: tuple[int, int, int, int]
    copied: int
    summed: int


SIZES = {
    "cuda": Sizes(8192, (8, 256, 128, 256), 2**30, 2**28),
    "cpu": Sizes(512, (1, 32, 64, 64), 2**25, 2**23),
}
FILTER = 7


def measured_device(pool: RankPool, name: str) -> Device:
    """Return what the ranks of a pool have.

    Args:
        pool: Of two ranks or more, on one host.
        name: Of the result.

    Raises:
        PlanError: There is one rank, and no link.
        WorkerError: A rank failed.
    """
    if pool.world_size < 2:
        msg = "--calibrate measures the link between ranks: --world-size 2 or more"
        raise PlanError(msg)
    found = pool.run(measure, pool.device, pool.world_size)
    own, link = ([part[side] for part in found] for side in (0, 1))
    return Device(name=name, link=Link(**_slowest(link)), **_slowest(own))


def _slowest(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {key: (max if key.endswith("_us") else min)(each[key] for each in found) for key in found[0]}


def measure(rank: int, device: str, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of this rank's device and of its link (runs in a rank process)."""
    sizes, half = SIZES[device], torch.bfloat16
    flops = 2 * sizes.matrix**3
    own = {
        "half_flops": flops / _seconds(_product(sizes, half, device), device),
        "single_flops": flops / _seconds(_product(sizes, torch.float32, device), device),
        "depthwise_flops": _depthwise_flops(sizes, half if device == "cuda" else torch.float32, device),
        "bytes_per_s": 2 * sizes.copied / _seconds(_copy(sizes, device), device),
        "kernel_us": 1e6 * _seconds(_small(device), device),
        "memory_gib": _memory_gib(device, ranks),
    }
    return own, _link(rank, ranks, sizes, device)


def _seconds(call: Callable[[], Any], device: str) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(TIMES):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - started)
    return sorted(found)[TIMES // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _product(sizes: Sizes, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    one = torch.randn(sizes.matrix, sizes.matrix, dtype=dtype, device=device)
    return lambda: one @ one


def _depthwise_flops(sizes: Sizes, dtype: torch.dtype, device: str) -> float:
    image = torch.randn(sizes.image, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    channels = image.shape[1]
    filters = torch.randn(channels, 1, FILTER, FILTER, dtype=dtype, device=device)
    seconds = _seconds(lambda: torch.conv2d(image, filters, padding=FILTER // 2, groups=channels), device)
    return 2 * FILTER**2 * image.numel() / seconds


def _copy(sizes: Sizes, device: str) -> Callable[[], Any]:
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _small(device: str) -> Callable[[], Any]:
    one = torch.zeros(1, device=device)
    return lambda: one.add_(1)


def _memory_gib(device: str, ranks: int) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[1]) / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / ranks


def _link(rank: int, ranks: int, sizes: Sizes, device: str) -> dict[str, float]:
    """Return the figures of the link: an exchange of a column and a sum of a number have next to no bytes."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    image = torch.zeros(1, 64, 64, FILTER, device=device)
    bounds = [FILTER * place for place in range(ranks + 1)]
    lo, hi = [b - 1 for b in bounds[:-1]], [b + 1 for b in bounds[1:]]
    geometry = (3, bounds, lo, hi, "constant", 0.0, rank, group)
    one, many = torch.zeros(1, device=device), torch.zeros(sizes.summed // 4, device=device)
    reduce_s = _seconds(lambda: dist.all_reduce(one), device)
    summed_s = _seconds(lambda: dist.all_reduce(many), device)
    return {
        "exchange_us": 1e6 * _seconds(lambda: halo_exchange.halo_exchange(image, *geometry), device),
        "reduce_us": 1e6 * reduce_s,
        "bytes_per_s": sizes.summed / max(summed_s - reduce_s, 1e-9),
    }

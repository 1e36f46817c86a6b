"""What a device and a link can do: the table that the planner estimates times from.

Figures are of sustained work, as measured, not of a data sheet.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fxshard.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _check(figures: Link | Device, *, positive: Sequence[str], finite: Sequence[str]) -> None:
    """Check the figures that are estimated with.

    Args:
        figures: Has them as attributes.
        positive: Those that are divided by; infinite is as fast as can be.
        finite: Those that are added up, 0 or more.

    Raises:
        PlanError: One is no number, or out of range.
    """
    for name in (*positive, *finite):
        value = getattr(figures, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and (value > 0 if name in positive else 0 <= value < math.inf)):
            wanted = "a number above 0" if name in positive else "a finite number, 0 or more"
            msg = f"{type(figures).__name__}.{name}={value!r} is not {wanted}"
            raise PlanError(msg)


@dataclass(frozen=True)
class Link:
    """Between the ranks of a mesh axis.

    Args:
        exchange_us: What a halo exchange, a gather or a redistribution takes without its bytes, in microseconds:
            packing and waiting.
        reduce_us: The same of an all-reduce.
        bytes_per_s: Of one rank.
    """

    exchange_us: float
    reduce_us: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check(self, positive=("bytes_per_s",), finite=("exchange_us", "reduce_us"))


@dataclass(frozen=True)
class Device:
    """One rank's device.

    Args:
        name: Its name in the table.
        half_flops: Floating point operations per second of convolutions and matrix products in half precision.
        single_flops: In single precision, and for whatever is wider.
        depthwise_flops: Of convolutions with a filter for each channel, which have kernels of their own.
        bytes_per_s: Of its memory.
        kernel_us: What a kernel takes without work, in microseconds.
        memory_gib: How much memory it has.
        link: To the other ranks.
    """

    name: str
    half_flops: float
    single_flops: float
    depthwise_flops: float
    bytes_per_s: float
    kernel_us: float
    memory_gib: float
    link: Link

    def __post_init__(self) -> None:
        speeds = ("half_flops", "single_flops", "depthwise_flops", "bytes_per_s", "memory_gib")
        _check(self, positive=speeds, finite=("kernel_us",))

    def to_json(self) -> str:
        """Return the figures as JSON; ``device="FILE.json"`` reads them."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def flops(self, dtype: torch.dtype, *, depthwise: bool = False) -> float:
        """Return how many operations per second it does on values of ``dtype``."""
        if depthwise:
            return self.depthwise_flops
        return self.half_flops if dtype in (torch.bfloat16, torch.float16) else self.single_flops


H200 = Device(
    name="h200",
    half_flops=700e12,
    single_flops=36e12,
    depthwise_flops=6e12,
    bytes_per_s=3.9e12,
    kernel_us=3.0,
    memory_gib=139.0,
    # ConvNeXt-XL, 7 x 3 x 512 x 1024, torch 2.11 (benchmarks/): matrix products 13.4 TFLOP in 18.8 ms, depthwise
    # kernels 0.2 TFLOP in 32 ms; single precision 53.6 TFLOP in 1.47 s
    # two H200 over NVLink: 72 halo exchanges of about 120 us in a step of ConvNeXt-XL; all-reduces of 25 MB to 1 GB
    link=Link(exchange_us=110.0, reduce_us=30.0, bytes_per_s=310e9),
)
"""NVIDIA H200, several of one host."""
DEVICES = {device.name: device for device in (H200,)}


def device_named(device: str | Device) -> Device:
    """Return a device of the table, the one that is given, or that of a file of ``fxshard bench --calibrate``.

    Raises:
        PlanError: The table has none of this name, or the file no device.
    """
    if isinstance(device, Device):
        return device
    if device.endswith(".json"):
        return _device_of_file(Path(device))
    if device not in DEVICES:
        known = ", ".join(DEVICES)
        msg = f"device={device!r} is not in the table; use one of {known}, a fxshard.devices.Device, or FILE.json"
        raise PlanError(msg)
    return DEVICES[device]


def _device_of_file(path: Path) -> Device:
    try:
        found = json.loads(path.read_text())
        return Device(**{**found, "link": Link(**found["link"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"device={str(path)!r} has no device: {error}; fxshard bench --calibrate --json {path} writes one"
        raise PlanError(msg) from error

"""What a device and a link can do: the table that the planner estimates times from.

Figures are of sustained work, as measured, not of a data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard.errors import PlanError


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
    """Return a device of the table, or the one that is given.

    Raises:
        PlanError: The table has none of this name.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        msg = f"device={device!r} is not in the table; use one of {', '.join(DEVICES)}, or a fxshard.devices.Device"
        raise PlanError(msg)
    return DEVICES[device]

"""Times depthwise convolutions: cuDNN's and fxshard's, forward and both gradients.

    python tools/bench_depthwise.py --json benchmarks/depthwise_h200.json

The shapes are those of ConvNeXt-XL's stages at 7 x 3 x 512 x 1024, and of one of two ranks: half the width, with the
halo in the input and no padding there.  :mod:`fxshard.faster` uses the kernels where this says that they are faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fxshard
import fxshard.ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGES = ((256, 128, 256), (512, 64, 128), (1024, 32, 64), (2048, 16, 32))
"""Channels, height and width."""
BATCH, HALO = 7, 6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ORDERS = {"last": torch.channels_last, "first": torch.contiguous_format}
OPS = torch.ops.fxshard


def shapes() -> Iterator[tuple[tuple[int, ...], int, tuple[int, int], str]]:
    """Yield the shape of the input, the filter's side, the padding and where channels are."""
    for channels, height, width in STAGES:
        yield (BATCH, channels, height, width), 7, (3, 3), "last"
        yield (BATCH, channels, height, width // 2 + HALO), 7, (3, 0), "last"
    for side in (3, 5, 7):
        yield (BATCH, 512, 64, 128), side, (side // 2, side // 2), "first"
    for side in (3, 5, 11):
        yield (BATCH, 512, 64, 128), side, (side // 2, side // 2), "last"


def microseconds(call: Callable[[], Any], times: int = 20) -> float:
    """Return the median time of a call."""
    for _ in range(3):
        call()
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host is ahead of the device
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000)
    median: float = statistics.median(found)
    return round(median, 1)


def away(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest value."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def row(shape: tuple[int, ...], side: int, padding: tuple[int, int], order: str, dtype: str) -> dict[str, Any]:
    """Return the times of both, and how far fxshard's results are from those in float64."""
    channels = shape[1]
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=DTYPES[dtype]).contiguous(memory_format=ORDERS[order])
    weight = torch.randn(channels, 1, side, side, device="cuda", dtype=x.dtype)
    bias = torch.randn(channels, device="cuda", dtype=x.dtype)
    rest = ([1, 1], list(padding), [1, 1], False, [0, 0], channels)
    grad = torch.randn_like(torch.ops.aten.convolution(x, weight, bias, *rest))

    def library(**needed: bool) -> Any:
        mask = [needed.get(name, False) for name in ("x", "weight", "bias")]
        return torch.ops.aten.convolution_backward(grad, x, weight, [channels], *rest, mask)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (
            lambda: torch.ops.aten.convolution(x, weight, bias, *rest),
            lambda: OPS.depthwise_conv2d(x, weight, bias, padding),
        ),
        "input": (lambda: library(x=True)[0], lambda: OPS.depthwise_conv2d_input(grad, weight, padding)),
        "weight": (lambda: library(weight=True)[1], lambda: OPS.depthwise_conv2d_weight(grad, x, [side] * 2, padding)),
    }
    wide = [t.double().contiguous() for t in (x, weight, bias, grad)]
    exact_y = torch.ops.aten.convolution(*wide[:3], *rest)
    exact = torch.ops.aten.convolution_backward(wide[3], *wide[:2], None, *rest, [True, True, False])
    differences = [away(ours(), e) for (_, ours), e in zip(pairs.values(), (exact_y, *exact[:2]), strict=True)]
    del wide, exact, exact_y
    times = {name: {"library_us": microseconds(a), "fxshard_us": microseconds(b)} for name, (a, b) in pairs.items()}
    return {
        "shape": shape,
        "side": side,
        "padding": padding,
        "channels_at": order,
        "dtype": dtype,
        **times,
        "worst_difference": max(differences),
    }


def main() -> None:
    """Print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    about = {
        "command": "python tools/bench_depthwise.py --json benchmarks/depthwise_h200.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "fxshard": fxshard.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = []
    for dtype in DTYPES:
        for one in shapes():
            rows.append(row(*one, dtype))
            found = rows[-1]
            times = "  ".join(
                f"{name} {found[name]['library_us']:7.1f} -> {found[name]['fxshard_us']:6.1f}"
                for name in ("forward", "input", "weight")
            )
            where = f"{'x'.join(map(str, found['shape']))} {found['side']} {found['channels_at']}"
            print(f"{dtype} {where:<24} us: {times}  differs {found['worst_difference']:.1e}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

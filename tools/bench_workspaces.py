"""Measures what cuDNN allocates beside the results of a convolution, in parts of the input's size.

    python tools/bench_workspaces.py --json benchmarks/workspaces_h200.json

Each row is the peak of ``torch.cuda.max_memory_allocated`` in one call of ``aten.convolution`` or
``aten.convolution_backward`` (both gradients), without what was there before and without the results.
:mod:`fxshard.memory` guesses from it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Row:
    """A convolution.

    Args:
        name: Of the kind.
        shape: Of its input.
        channels: That it makes.
        kernel: Along each dimension.
        stride: Along each dimension.
        depthwise: Whether each channel is a group.
        transposed: Whether it is a transposed one.
    """

    name: str
    shape: tuple[int, ...]
    channels: int
    kernel: int
    stride: int = 1
    depthwise: bool = False
    transposed: bool = False


ROWS = (
    Row("1x1", (4, 64, 272, 480), 256, 1),
    Row("1x1 back", (4, 256, 272, 480), 64, 1),
    Row("3x3", (4, 64, 272, 480), 64, 3),
    Row("3x3 of 256", (4, 256, 68, 120), 256, 3),
    Row("3x3 stride 2", (4, 128, 272, 480), 128, 3, 2),
    Row("7x7 stride 2", (4, 3, 1088, 1920), 64, 7, 2),
    Row("4x4 stride 4", (7, 3, 512, 1024), 256, 4, 4),
    Row("depthwise 3x3", (4, 128, 136, 240), 128, 3, depthwise=True),
    Row("depthwise 7x7", (4, 96, 128, 512), 96, 7, depthwise=True),
    Row("depthwise 7x7 half", (4, 96, 128, 262), 96, 7, depthwise=True),
    Row("transposed 2x2", (4, 128, 136, 240), 64, 2, 2, transposed=True),
    Row("3x3x3", (1, 32, 128, 128, 256), 32, 3),
    Row("3x3x3 half", (1, 32, 128, 128, 130), 32, 3),
    Row("3x3x3 of a joined map", (1, 64, 128, 128, 256), 32, 3),
    Row("3x3x3 of a joined map half", (1, 64, 128, 128, 130), 32, 3),
    Row("3x3x3 of 128", (1, 128, 32, 32, 64), 128, 3),
    Row("3x3x3 first", (1, 1, 128, 128, 256), 32, 3),
    Row("transposed 2x2x2", (1, 64, 64, 64, 128), 32, 2, 2, transposed=True),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def beside(call: Callable[[], Any]) -> int:
    """Return the bytes that a call allocates for a time, beside its results."""
    call()  # cuDNN chooses
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del results
    return peak - max(before, after)


def measured(row: Row, dtype: torch.dtype, order: torch.memory_format) -> dict[str, int]:
    """Return the bytes beside the results, forward and backward, and those of the input and the output."""
    spatial = len(row.shape) - 2
    groups = row.shape[1] if row.depthwise else 1
    weights = (row.shape[1], row.channels) if row.transposed else (row.channels, row.shape[1] // groups)
    x = torch.randn(row.shape, device="cuda", dtype=dtype).contiguous(memory_format=order)
    weight = torch.randn(*weights, *[row.kernel] * spatial, device="cuda", dtype=dtype).contiguous(memory_format=order)
    padding = 0 if row.stride > 1 and row.kernel == row.stride else row.kernel // 2
    rest = ([row.stride] * spatial, [padding] * spatial, [1] * spatial, row.transposed, [0] * spatial, groups)
    out = torch.ops.aten.convolution(x, weight, None, *rest)
    grad = torch.randn_like(out)
    backward = torch.ops.aten.convolution_backward
    return {
        "input": x.nbytes,
        "output": out.nbytes,
        "forward": beside(lambda: torch.ops.aten.convolution(x, weight, None, *rest)),
        "backward": beside(lambda: backward(grad, x, weight, None, *rest, [True, True, False])),
    }


def results() -> Iterator[dict[str, Any]]:
    """Yield a row for each convolution, type and memory format."""
    for row in ROWS:
        last = torch.channels_last if len(row.shape) == 4 else torch.channels_last_3d
        for name, dtype in DTYPES.items():
            for order, format_name in ((torch.contiguous_format, "first"), (last, "last")):
                found = measured(row, dtype, order)
                parts = {way: round(found[way] / found["input"], 2) for way in ("forward", "backward")}
                yield {**asdict(row), "dtype": name, "channels_at": format_name, **found, "of_input": parts}


def main() -> None:
    """Print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    rows = []
    for row in results():
        rows.append(row)
        of_input = row["of_input"]
        out = row["output"] / row["input"]
        print(
            f"{row['name']:<28}{row['dtype']:<6}{row['channels_at']:<6}output {out:5.2f}"
            f"  forward {of_input['forward']:6.2f}  backward {of_input['backward']:6.2f}  of the input",
            flush=True,
        )
    about = {
        "command": "python tools/bench_workspaces.py --json benchmarks/workspaces_h200.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json:
        args.json.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

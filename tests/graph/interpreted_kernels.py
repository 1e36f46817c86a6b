"""Runs kernels in Triton's interpreter and prints how far they are from torch: a program, as Triton is told at import.

TRITON_INTERPRET=1 python -m tests.graph.interpreted_kernels
"""

from __future__ import annotations

import itertools
import json
import sys

import torch

from fxshard.kernels.depthwise import convolve, correlate

SHAPES = ((2, 5, 9, 11), (1, 40, 3, 2), (0, 3, 8, 8))
FILTERS = (((7, 7), (3, 3)), ((5, 3), (4, 0)))
FORMATS = (torch.contiguous_format, torch.channels_last)


def away(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference."""
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max()) if found.numel() else 0.0


def main() -> None:
    """Print the largest difference of each kernel as JSON."""
    worst = {"output": 0.0, "input": 0.0, "filter": 0.0}
    for (shape, (kernel, padding)), order in itertools.product(itertools.product(SHAPES, FILTERS), FORMATS):
        if any(n + 2 * p < k for n, k, p in zip(shape[2:], kernel, padding, strict=True)):
            continue
        torch.manual_seed(0)
        x = torch.randn(shape).contiguous(memory_format=order)
        weight, bias = torch.randn(shape[1], 1, *kernel), torch.randn(shape[1])
        rest = ([1, 1], list(padding), [1, 1], False, [0, 0], shape[1])
        y = torch.ops.aten.convolution(x.double(), weight.double(), bias.double(), *rest)
        grad = torch.randn(y.shape)
        gradients = torch.ops.aten.convolution_backward(
            grad.double(), x.double(), weight.double(), None, *rest, [True, True, False]
        )
        around = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
        found = (
            convolve(x, weight, bias, padding),
            convolve(grad, weight, None, around, turned=True),
            correlate(grad, x, kernel, padding),
        )
        for name, made, expected in zip(worst, found, (y, *gradients[:2]), strict=True):
            worst[name] = max(worst[name], away(made, expected))
    sys.stdout.write(json.dumps(worst))


if __name__ == "__main__":
    main()

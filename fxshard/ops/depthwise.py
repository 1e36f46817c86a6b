"""``fxshard::depthwise_conv2d``: a convolution with a filter for each channel, by a kernel of fxshard's.

It is ``aten.conv2d(x, weight, bias, 1, padding, 1, groups=C)``, with the same order in memory of what comes out.
:mod:`fxshard.passes.use_kernels` puts it where the kernel is faster.  Elsewhere than on a GPU it is that convolution.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _aten(channels: int, padding: Sequence[int]) -> tuple[Any, ...]:
    """Return the arguments of aten's convolution from the stride on."""
    return [1, 1], list(padding), [1, 1], False, [0, 0], channels


def _kernels() -> Any:
    """Return the module of the kernels, which needs Triton."""
    return import_module("fxshard.kernels.depthwise")


def _ordered(made: Tensor, like: Tensor) -> Tensor:
    """Return ``made`` in the order in memory that a convolution of ``like`` has."""
    return made.contiguous(memory_format=_order(like))


def _order(x: Tensor) -> torch.memory_format:
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


@torch.library.custom_op(
    "fxshard::depthwise_conv2d",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor",
)
def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """Return the convolution.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW), of its type.
        bias: (C,), or None.
        padding: Zeros on both sides of H and W, less than KH and KW.

    Returns:
        (N, C, H + 2 PH - KH + 1, W + 2 PW - KW + 1), channels last where ``x`` is.
    """
    if x.device.type != "cuda":
        made: Tensor = torch.ops.aten.convolution(x, weight, bias, *_aten(x.shape[1], padding))
        return _ordered(made, x)
    return _ordered(_kernels().convolve(x, weight, bias, padding), x)


@depthwise_conv2d.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    del bias
    sizes = (n + 2 * p - k + 1 for n, k, p in zip(x.shape[2:], weight.shape[2:], padding, strict=True))
    return x.new_empty((*x.shape[:2], *sizes)).contiguous(memory_format=_order(x))


@torch.library.custom_op(
    "fxshard::depthwise_conv2d_input",
    mutates_args=(),
    schema="(Tensor grad, Tensor weight, int[] padding) -> Tensor",
)
def depthwise_conv2d_input(grad: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the gradient of the input: the convolution of the output's with the filters turned round.

    Args:
        grad: Of the output, (N, C, H', W').
        weight: (C, 1, KH, KW).
        padding: Of the convolution.

    Returns:
        (N, C, H, W), channels last where ``grad`` is.
    """
    around = [k - 1 - p for k, p in zip(weight.shape[2:], padding, strict=True)]
    if grad.device.type != "cuda":
        made: Tensor = torch.ops.aten.convolution(grad, weight.flip(2, 3), None, *_aten(grad.shape[1], around))
        return _ordered(made, grad)
    return _ordered(_kernels().convolve(grad, weight, None, around, turned=True), grad)


@depthwise_conv2d_input.register_fake
def _(grad: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    sizes = (n - 2 * p + k - 1 for n, k, p in zip(grad.shape[2:], weight.shape[2:], padding, strict=True))
    return grad.new_empty((*grad.shape[:2], *sizes)).contiguous(memory_format=_order(grad))


@torch.library.custom_op(
    "fxshard::depthwise_conv2d_weight",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, int[] kernel, int[] padding) -> Tensor",
)
def depthwise_conv2d_weight(grad: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the gradient of the filters.

    Args:
        grad: Of the output, (N, C, H', W').
        x: The input, (N, C, H, W).
        kernel: KH and KW.
        padding: Of the convolution.

    Returns:
        (C, 1, KH, KW).
    """
    if grad.device.type != "cuda":
        like = x.new_empty((x.shape[1], 1, *kernel))
        rest = (None, *_aten(x.shape[1], padding), [False, True, False])
        made: Tensor = torch.ops.aten.convolution_backward(grad, x, like, *rest)[1]
        return made.contiguous()
    return _kernels().correlate(grad, x, kernel, padding)


@depthwise_conv2d_weight.register_fake
def _(grad: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    del grad, padding
    return x.new_empty((x.shape[1], 1, *kernel))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, _, padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.padding = padding


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    ops, (of_x, of_weight, of_bias, _) = torch.ops.fxshard, ctx.needs_input_grad
    return (
        ops.depthwise_conv2d_input(grad, weight, ctx.padding) if of_x else None,
        ops.depthwise_conv2d_weight(grad, x, list(weight.shape[2:]), ctx.padding) if of_weight else None,
        grad.sum((0, 2, 3)) if of_bias else None,
        None,
    )


depthwise_conv2d.register_autograd(_backward, setup_context=_keep)
DEPTHWISE_CONV2D = torch.ops.fxshard.depthwise_conv2d.default

"""Draws the random numbers of a whole tensor with the kernel that eager mode uses, in program order.

Every random operator of a captured graph becomes ``fxshard::random`` and arithmetic on its result.  Each draw
takes the token of the draw before it, so the order of the draws is the order of the data and no backend can
change it, merge two draws or drop one that a later one needs::

                after=None        token             token
    generator --> random ----------> random ----------> random --> keep_draws --> an output
                    |                  |                  |          (only where the last
                  value              value              value         value is not used)

The value has the global shape on every rank: ranks whose generators agree have the same numbers, and a sharded
consumer takes its slice.  That costs the memory of the global tensor for the time of the draw.

The *blank* is the tensor that eager mode would fill.  Its size, stride, dtype and device decide which number
lands where, so they are part of the call.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Devices on which ATen's dropout is one fused kernel (is_fused_kernel_acceptable in ATen/native/Dropout.cpp).
FUSED_DROPOUT_DEVICES = frozenset({"cuda", "xpu"})

FILLS = frozenset({"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"})
MASKS = frozenset({"dropout_mask", "native_dropout_mask"})

# The fused kernel vectorizes by alignment; a block begins aligned, and nothing is wider than this many elements.
ALIGNED_ELEMENTS = 64


@dataclass(frozen=True)
class Blank:
    """The tensor that eager mode would fill.

    Args:
        size: The global size.
        stride: The stride in elements.
        dtype: The data type.
        device: Where it lies.
    """

    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    def empty(self, offset: int = 0) -> Tensor:
        """Return the tensor, not filled, ``offset`` elements behind the start of an aligned block."""
        if offset == 0:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        span = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        block = torch.empty(offset + span, dtype=self.dtype, device=self.device)
        return block.as_strided(self.size, self.stride, offset)

    def empty_like(self) -> Tensor:
        """Return what ``torch.empty_like`` of it would be: dense, in the same order of dimensions."""
        shape_only = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return torch.empty_like(shape_only, device=self.device)


def _dropout_mask(blank: Blank, _given: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
    if blank.device.type in FUSED_DROPOUT_DEVICES:
        return _native_dropout_mask(blank, _given, params)
    return blank.empty_like().bernoulli_(1 - params[0]).to(torch.bool)


def _native_dropout_mask(blank: Blank, _given: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
    p, offset = params
    return torch.native_dropout(blank.empty(offset), p, True)[1]  # the mask does not depend on the values


def _rrelu_noise(_blank: Blank, given: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
    noise = torch.empty_like(given[0])
    torch.ops.aten.rrelu_with_noise.default(given[0], noise, *params, True)
    return noise


_KERNELS: dict[str, Callable[[Blank, Sequence[Tensor], Sequence[Any]], Tensor]] = {
    "bernoulli_of": lambda _blank, given, _params: torch.bernoulli(given[0]),
    "binomial": lambda _blank, given, _params: torch.binomial(given[0], given[1]),
    "dropout_mask": _dropout_mask,
    "multinomial": lambda _blank, given, params: torch.multinomial(given[0], *params),
    "native_dropout_mask": _native_dropout_mask,
    "normal_around": lambda _blank, given, params: torch.normal(*given, *params),
    "normal_scaled": lambda _blank, given, params: torch.normal(*params, *given),
    "poisson": lambda _blank, given, _params: torch.poisson(given[0]),
    "randperm": lambda blank, _given, params: torch.randperm(*params, dtype=blank.dtype, device=blank.device),
    "rrelu_noise": _rrelu_noise,
}


def _kernel(draw: str) -> Callable[[Blank, Sequence[Tensor], Sequence[Any]], Tensor]:
    if draw in FILLS:
        fill = operator.attrgetter(f"{draw}_")
        return lambda blank, given, params: fill(blank.empty())(*given, *params)
    return _KERNELS[draw]


@torch.library.custom_op(
    "fxshard::random",
    mutates_args=(),
    schema=(
        "(Tensor[] given, str draw, Scalar[] params, int[] size, int[] stride, ScalarType dtype, Device device,"
        " Tensor? after) -> (Tensor, Tensor)"
    ),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def random(  # noqa: PLR0913, PLR0917  the operator's schema
    given: Sequence[Tensor],
    draw: str,
    params: Sequence[Any],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    after: Tensor | None,  # noqa: ARG001  orders the draws
) -> tuple[Tensor, Tensor]:
    """Draw a whole tensor as eager mode does and advance the default generator of ``device``.

    Args:
        given: Whole tensors whose values the draw depends on, such as probabilities.  Their gradient is zero,
            as in ATen.
        draw: What to draw: a name of ``FILLS`` (the in-place method of that name fills the blank), a mask of
            ``MASKS``, or one of the draws that make their own result: ``bernoulli_of``, ``binomial``,
            ``multinomial``, ``normal_around``, ``normal_scaled``, ``poisson``, ``randperm``, ``rrelu_noise``.
        params: The numbers that the eager function takes, in its order.  Masks: the dropout probability and
            the storage offset of the dropped tensor in elements.
        size: The blank's global size.
        stride: The blank's stride in elements.
        dtype: The blank's data type.
        device: The blank's device.
        after: The token of the draw before this one; None for the first.

    Returns:
        The drawn tensor, dense (a mask is ``torch.bool``), and an empty token for the next draw.

    Raises:
        KeyError: ``draw`` is not known.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> value, token = random([], "normal", [0.0, 1.0], [2, 3], [3, 1], torch.float32, torch.device("cpu"), None)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(value, torch.randn(2, 3)), token.numel()
        (True, 0)
    """
    blank = Blank(size, stride, dtype, device)
    value = _kernel(draw)(blank, given, params)
    like = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
    dense = torch.empty_like(like)
    if value.stride() != dense.stride():
        value = torch.empty_like(dense, device=value.device).copy_(value)
    return value, _token(device)


def _token(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int8, device=device)  # an integer: it never requires a gradient


@random.register_fake
def _random_fake(
    _given: Sequence[Tensor],
    draw: str,
    _params: Sequence[Any],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    _after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    blank = torch.empty_strided(size, stride, dtype=torch.bool if draw in MASKS else dtype, device=device)
    return torch.empty_like(blank), _token(device)


def _random_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.given_sizes = [t.size() for t in inputs[0]]
    # torch takes an empty list, of numbers too, for a list of tensors and wants one back.
    ctx.no_gradients = [[] if isinstance(value, (list, tuple)) and not value else None for value in inputs[1:]]


def _random_backward(ctx: Any, grad_value: Tensor, _grad_token: Tensor | None) -> tuple[Any, ...]:
    return [grad_value.new_zeros(size) for size in ctx.given_sizes], *ctx.no_gradients


random.register_autograd(_random_backward, setup_context=_random_setup)


@torch.library.custom_op("fxshard::keep_draws", mutates_args=())
def keep_draws(value: Tensor, token: Tensor) -> Tensor:  # noqa: ARG001  keeps the draws before it alive
    """Return a copy of ``value`` that depends on ``token``, so that dead code elimination keeps the draw.

    Args:
        value: Any tensor; its gradient passes through.
        token: The token of the last draw.

    Returns:
        A copy of ``value``.

    Example:
        >>> _, token = random([], "uniform", [0.0, 1.0], [1], [1], torch.float32, torch.device("cpu"), None)
        >>> keep_draws(torch.tensor([1.0, 2.0]), token)
        tensor([1., 2.])
    """
    return value.clone()


@keep_draws.register_fake
def _keep_draws_fake(value: Tensor, _token: Tensor) -> Tensor:
    return torch.empty_like(value)


def _keep_draws_backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


keep_draws.register_autograd(_keep_draws_backward)

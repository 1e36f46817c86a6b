"""``fxshard::counter``: random numbers that depend on a seed and on where they stand, and on nothing else.

Each element's bits are SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
a counter that is hashed::

    key       = mix(seed + call * G)                   one for each draw of the graph
    bits(i)   = mix(key + (2 i + word + 1) * G)        i: the row-major index in the whole tensor, two words for each

so a rank makes its part alone, and the numbers are the same for any number of ranks.  The seed is drawn from the
default generator once for each run of the graph.  Uniform numbers have as many bits as their dtype's significand;
normal ones are Box and Muller's.

Arithmetic is in int64, which wraps; a logical shift is an arithmetic one with the sign's copies masked off.
Compilers keep the operator whole: Inductor would take the products for indices, which must not wrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard.errors import FxShardError
from fxshard.ops.memory import empty_like_order, inverse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _signed(word: int) -> int:
    """Return the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
SIGNIFICAND = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""How many bits a uniform number of a dtype has."""


def _shifted(x: Tensor, by: int) -> Tensor:
    return torch.bitwise_and(torch.bitwise_right_shift(x, by), (1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64's hash of each element."""
    x = torch.bitwise_xor(x, _shifted(x, 30)) * FIRST
    x = torch.bitwise_xor(x, _shifted(x, 27)) * SECOND
    return torch.bitwise_xor(x, _shifted(x, 31))


@dataclass(frozen=True)
class Words:
    """Two random words for each element.

    Args:
        key: The draw's key, one element.
        index: Each element's place in the whole tensor.
        dtype: What is wanted.
    """

    key: Tensor
    index: Tensor
    dtype: torch.dtype

    @property
    def real(self) -> torch.dtype:
        """The dtype that real numbers are computed in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def bits(self, word: int = 0) -> Tensor:
        """Return 64 bits for each element."""
        return _mix((self.index * 2 + (word + 1)) * GOLDEN + self.key)

    def uniform(self, word: int = 0, digits: int | None = None) -> Tensor:
        """Return numbers in [0, 1) of so many bits; those of the dtype that is computed in where it is not said."""
        count = digits or SIGNIFICAND[self.real]
        return _shifted(self.bits(word), 64 - count).to(self.real) * 2.0**-count

    def normal(self) -> Tensor:
        """Return numbers with mean 0 and standard deviation 1."""
        radius = torch.sqrt(-2.0 * torch.log(1.0 - self.uniform(0)))
        return radius * torch.cos(2.0 * math.pi * self.uniform(1))


def _uniform(words: Words, params: Sequence[Any]) -> Tensor:
    low, high = params
    return words.uniform(digits=SIGNIFICAND[words.dtype]) * (high - low) + low


def _integers(words: Words, params: Sequence[Any]) -> Tensor:
    low, high = (int(p) for p in params)
    return torch.remainder(_shifted(words.bits(), 1), high - low) + low


DRAWS: dict[str, Callable[[Words, Sequence[Any]], Tensor]] = {
    "bernoulli": lambda words, params: words.uniform() < params[0],
    "dropout": lambda words, params: (words.uniform() >= params[0]).to(words.real) * (1.0 / (1.0 - params[0])),
    "exponential": lambda words, params: -torch.log(1.0 - words.uniform()) / params[0],
    "log_normal": lambda words, params: torch.exp(words.normal() * params[1] + params[0]),
    "normal": lambda words, params: words.normal() * params[1] + params[0],
    "random": _integers,
    "uniform": _uniform,
}
"""What can be drawn: the in-place method of that name with its numbers, and ``dropout``, the noise of probability p."""

SCHEMA = (
    "(Tensor seed, int call, str draw, Scalar[] params, int[] size, int[] start, int[] length, int[] order, "
    "ScalarType dtype) -> Tensor"
)


@torch.library.custom_op("fxshard::counter", mutates_args=(), schema=SCHEMA)
def counter(  # noqa: PLR0913, PLR0917  the schema's arguments
    seed: Tensor,
    call: int,
    draw: str,
    params: Sequence[Any],
    size: Sequence[int],
    start: Sequence[int],
    length: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return a part of a random tensor.

    Args:
        seed: One int64, the same on every rank.
        call: Which draw of the graph.
        draw: A name of :data:`DRAWS`.
        params: Its numbers.
        size: The whole's shape.
        start: Where the part begins in each dimension.
        length: The part's shape.
        order: The part's dimensions from the slowest to the fastest in memory.
        dtype: The part's dtype.

    Returns:
        A new tensor without a gradient.

    Raises:
        FxShardError: There is no such draw.
    """
    _check(draw)
    places = _index(size, start, length, order, seed.device)
    key = _mix(seed.reshape(()) + _signed(call * GOLDEN & (1 << 64) - 1))
    drawn = DRAWS[draw](Words(key, places, dtype), params).to(dtype)
    return drawn.permute(inverse(tuple(order)))


def _index(
    size: Sequence[int], start: Sequence[int], length: Sequence[int], order: Sequence[int], device: torch.device
) -> Tensor:
    """Return the row-major index in the whole of each position, with the dimensions in memory order."""
    index = torch.zeros([length[d] for d in order], dtype=torch.int64, device=device)
    for at, dim in enumerate(order):
        step = math.prod(size[dim + 1 :])
        along = torch.arange(start[dim], start[dim] + length[dim], dtype=torch.int64, device=device) * step
        index = index + along.reshape([-1 if d == at else 1 for d in range(len(order))])
    return index


def _check(draw: str) -> None:
    if draw not in DRAWS:
        msg = f"fxshard::counter: draw {draw!r} is not one of {', '.join(DRAWS)}"
        raise FxShardError(msg)


@counter.register_fake
def _(seed: Tensor, call: int, draw: str, *args: Any) -> Tensor:  # noqa: ARG001
    _check(draw)
    _, _, _, length, order, dtype = args
    return empty_like_order(seed.new_empty(0, dtype=dtype), length, tuple(order))

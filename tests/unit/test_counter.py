"""Counted draws: their distribution, and parts that are parts of the whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fxshard.ops  # noqa: F401  defines the operator
from fxshard.errors import FxShardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

COUNT = 1 << 16


def drawn(
    draw: str, params: Sequence[float], size: Sequence[int] = (COUNT,), dtype: torch.dtype = torch.float64, **place: Any
) -> Tensor:
    """Return a draw, whole where no place is said."""
    where = {"start": [0] * len(size), "length": list(size), "order": list(range(len(size)))} | place
    seed = torch.tensor([place.pop("seed", 1234)])
    where.pop("seed", None)
    call = where.pop("call", 0)
    found: Tensor = torch.ops.fxshard.counter(seed, call, draw, list(params), list(size), dtype=dtype, **where)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    values = drawn("uniform", (0, 1), dtype=dtype).double()
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, 64, 0, 1)
    assert float(((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum()) < 110  # chi square, 63 degrees: p = 2e-4


def test_neighbours_are_independent() -> None:
    values = drawn("uniform", (-math.sqrt(3), math.sqrt(3)), (256, 256))
    for shifted in (values.roll(1, 0), values.roll(1, 1), drawn("uniform", (-1, 1), (256, 256), call=1)):
        assert abs(float((values * shifted).mean())) < 5 / 256


@pytest.mark.parametrize(
    ("draw", "params", "mean", "std"),
    [
        ("normal", (2, 3), 2, 3),
        ("uniform", (-1, 3), 1, 4 / math.sqrt(12)),
        ("bernoulli", (0.3,), 0.3, math.sqrt(0.21)),
        ("dropout", (0.25,), 1, math.sqrt(1 / 3)),
        ("exponential", (2,), 0.5, 0.5),
        ("random", (10, 20), 14.5, math.sqrt(99 / 12)),
        ("log_normal", (0, 0.5), math.exp(0.125), math.sqrt((math.exp(0.25) - 1) * math.exp(0.25))),
    ],
)
def test_moments(draw: str, params: Sequence[float], mean: float, std: float) -> None:
    values = drawn(draw, params)
    assert abs(float(values.mean()) - mean) < 5 * std / math.sqrt(COUNT)
    assert abs(float(values.std()) / std - 1) < 0.05


def test_normal_numbers_are_normal() -> None:
    values, _ = drawn("normal", (0, 1)).sort()
    expected = torch.special.ndtr(values)
    distance = (expected - torch.arange(COUNT) / COUNT).abs().max()
    assert float(distance) < 1.9 / math.sqrt(COUNT)  # Kolmogorov and Smirnov: p = 1e-3


def test_integers_are_in_range() -> None:
    values = drawn("random", (-3, 4), dtype=torch.int64)
    assert values.unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]


def test_a_part_is_a_part_of_the_whole() -> None:
    size = (3, 5, 8)
    whole = drawn("normal", (0, 1), size)
    part = drawn("normal", (0, 1), size, start=[1, 0, 3], length=[2, 5, 4])
    assert torch.equal(part, whole[1:, :, 3:7])
    assert drawn("normal", (0, 1), size, start=[0, 0, 8], length=[3, 5, 0]).shape == (3, 5, 0)


def test_memory_order_does_not_change_the_numbers() -> None:
    size = (2, 3, 4, 5)
    last = drawn("uniform", (0, 1), size, order=[0, 2, 3, 1])
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, drawn("uniform", (0, 1), size))


def test_other_seeds_and_calls_draw_other_numbers() -> None:
    first = drawn("uniform", (0, 1))
    assert torch.equal(first, drawn("uniform", (0, 1)))
    assert not (first == drawn("uniform", (0, 1), call=1)).any()
    assert not (first == drawn("uniform", (0, 1), seed=1235)).any()


def test_unknown_draws_are_refused() -> None:
    with pytest.raises(FxShardError, match="'weibull' is not one of"):
        drawn("weibull", (1, 1))

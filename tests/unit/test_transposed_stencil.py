"""The windows of a transposed convolution against a loop over every input and tap."""

from __future__ import annotations

import itertools

import pytest

from fxshard.rules.conv_transpose import TransposedStencil
from fxshard.window import Stencil

STENCILS = [
    Stencil(k, s, p, d) for k, s, p, d in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2))
]  # those whose padding reaches past the kernel too


def painters(stencil: Stencil, size: int, out: int) -> set[int]:
    taps = range(stencil.kernel)
    found = {
        (i, j) for i in range(size) for j in taps if i * stencil.stride - stencil.padding + stencil.dilation * j == out
    }
    return {i for i, _ in found}


@pytest.mark.parametrize("stencil", STENCILS, ids=str)
def test_window_has_every_painter_and_covers_the_share(stencil: Stencil) -> None:
    transposed, size = TransposedStencil(stencil), 8
    out_size = (size - 1) * stencil.stride - 2 * stencil.padding + stencil.reach + 1
    for lo, hi in itertools.combinations(range(out_size + 1), 2):
        window = transposed.window(lo, hi)
        needed = set().union(*(painters(stencil, size, o) for o in range(lo, hi)))
        assert needed <= set(range(*window))
        before, behind = transposed.margins(window, lo, hi)
        assert before >= 0
        assert behind >= 0
        painted = (window[1] - 1 - window[0]) * stencil.stride + stencil.reach + 1
        assert painted == before + hi - lo + behind


@pytest.mark.parametrize(
    ("stencil", "out_size", "bounds"),
    [
        (Stencil(2, 2), 20, (0, 8, 20)),
        (Stencil(4, 2, 1), 20, (0, 8, 20)),
        (Stencil(3, 2, 1), 20, (0, 8, 20)),
        (Stencil(3, 2, 1), 19, (0, 8, 19)),
        (Stencil(3, 1, 1), 10, (0, 4, 10)),
        (Stencil(5, 1), 14, (0, 6, 14)),
    ],
    ids=str,
)
def test_output_bounds(stencil: Stencil, out_size: int, bounds: tuple[int, ...]) -> None:
    assert TransposedStencil(stencil).output_bounds((0, 4, 10), out_size) == bounds


def test_patches_fetch_what_is_owned() -> None:
    transposed = TransposedStencil(Stencil(kernel=4, stride=4))
    assert transposed.output_bounds((0, 3, 7), 28) == (0, 12, 28)
    assert [transposed.window(0, 12), transposed.window(12, 28)] == [(0, 3), (3, 7)]

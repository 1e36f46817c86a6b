"""The geometry of pools and of positions against ATen's operators and index loops."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fxshard.layout import Layout, Replicate, Shard
from fxshard.rules.adaptive_pool import bin_weights, own_edges
from fxshard.rules.extremum import owned_positions
from fxshard.rules.pool import counted
from fxshard.window import Stencil


@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 3, 1), (4, 3, 2), (3, 1, 0), (5, 2, 2)])
@pytest.mark.parametrize("size", [5, 8, 11])
def test_count_is_what_aten_divides_by(
    size: int, kernel: int, stride: int, padding: int, ceil_mode: bool, include_pad: bool
) -> None:
    ones = torch.ones(1, 1, size, dtype=torch.float64)
    mean = F.avg_pool1d(ones, kernel, stride, padding, ceil_mode, include_pad)[0, 0]
    stencil = Stencil(kernel, stride, padding)
    for out, value in enumerate(mean.tolist()):
        lo, hi = stencil.window(out, out + 1)
        inside = min(hi, size) - max(lo, 0)
        assert value == pytest.approx(inside / counted(stencil, out, size, include_pad=include_pad))


@pytest.mark.parametrize(("size", "bins"), [(7, 3), (5, 5), (4, 7), (13, 1), (11, 4)])
def test_bins_are_those_of_aten(size: int, bins: int) -> None:
    x = torch.randn(1, 1, size, dtype=torch.float64)
    weights = torch.tensor(bin_weights(size, bins, 0, size), dtype=torch.float64)
    torch.testing.assert_close(F.adaptive_avg_pool1d(x, bins)[0, 0], weights @ x[0, 0])


@pytest.mark.parametrize(("size", "bins"), [(7, 3), (5, 5), (4, 7), (13, 1), (11, 4)])
@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 3, 4)])
def test_own_edges_are_the_positions_with_weight(size: int, bins: int, bounds: tuple[int, ...]) -> None:
    for lo, hi in itertools.pairwise((*bounds[:-1], size)):
        rows = bin_weights(size, bins, lo, hi)
        expected = [{i for i, weight in enumerate(row) if weight > 0} for row in rows]
        assert [set(range(start, end)) for start, end in own_edges(size, bins, lo, hi)] == expected


def test_owned_positions_of_two_axes_on_one_flattened_dimension() -> None:
    height, width = 4, 6
    layout = Layout((Shard(1, (0, 3 * width, height * width)), Shard(1, (0, 2, width), outer=height)))
    grid = torch.arange(height * width).reshape(height, width)
    parts = {(0, 0): grid[:3, :2], (0, 1): grid[:3, 2:], (1, 0): grid[3:, :2], (1, 1): grid[3:, 2:]}
    for coords, part in parts.items():
        assert owned_positions(layout, 1, height * width, coords) == part.flatten().tolist()


def test_owned_positions_of_a_whole_dimension() -> None:
    assert owned_positions(Layout((Replicate(), Shard(0, (0, 1, 2)))), 1, 3, (1, 1)) == [0, 1, 2]

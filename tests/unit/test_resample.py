"""The maps of ``fxshard.rules.resample`` are ATen's, forward and backward, and survive being split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fxshard.rules.resample import Resample, Taps, all_taps, split_resample, tap_columns

aten = torch.ops.aten
OPS: dict[str, Any] = {
    "nearest": aten.upsample_nearest2d.default,
    "nearest-exact": aten._upsample_nearest_exact2d.default,
    "linear": aten.upsample_bilinear2d.default,
    "cubic": aten.upsample_bicubic2d.default,
    "linear-aa": aten._upsample_bilinear2d_aa.default,
    "cubic-aa": aten._upsample_bicubic2d_aa.default,
}
if hasattr(aten, "_upsample_lanczos2d_aa"):
    OPS["lanczos-aa"] = aten._upsample_lanczos2d_aa.default
SIZES: list[tuple[int, int, float | None]] = [
    (7, 18, None),
    (26, 22, None),
    (30, 58, None),
    (30, 9, None),
    (13, 26, None),
    (12, 4, None),
    (5, 1, None),
]
SCALES: list[tuple[int, int, float | None]] = [
    (9, 15, 1.7),
    (31, 9, 0.3),
    (11, 12, 1.1),
    (7, 23, 3.3),
    (10, 5, 0.5),
    (12, 4, 0.4),
]
MODES = [(kind, corners) for kind in OPS for corners in (False, True) if not (corners and kind.startswith("nearest"))]


def matrix(rows: tuple[Taps, ...], size: int) -> Tensor:
    dense = torch.zeros(len(rows), size, dtype=torch.float64)
    for row, taps in zip(dense, rows, strict=True):
        for place, weight in zip(*taps, strict=True):
            row[place] += weight
    return dense


def operator(resample: Resample, x: Tensor, width: int) -> Tensor:
    corners = [] if resample.kind.startswith("nearest") else [resample.align_corners]
    return OPS[resample.kind](x, [resample.out_size, width], *corners, resample.scale, None)


@pytest.mark.parametrize("width", [2, 160], ids=["small", "large"])
@pytest.mark.parametrize(("size", "out_size", "scale"), SIZES + SCALES)
@pytest.mark.parametrize(("kind", "align_corners"), MODES)
def test_forward_and_backward_are_atens(
    kind: Any, size: int, out_size: int, scale: float | None, align_corners: bool, width: int
) -> None:
    is_nearest = kind.startswith("nearest")
    resample = Resample(
        kind, size, out_size, scale, align_corners, double=is_nearest and out_size + width > 128, narrow_floor=True
    )
    columns = torch.eye(size, dtype=torch.float64).reshape(1, size, size, 1).expand(1, size, size, width)
    forward = operator(resample, columns.contiguous(), width)[0, :, :, 0].T
    torch.testing.assert_close(matrix(all_taps(resample), size), forward, rtol=0, atol=1e-10)
    x = torch.zeros(out_size, 1, size, width, dtype=torch.float64, requires_grad=True)
    rows = torch.eye(out_size, dtype=torch.float64).reshape(out_size, 1, out_size, 1)
    (operator(resample, x, width) * rows).sum().div(width).backward()
    assert x.grad is not None
    backward = x.grad.sum(dim=(1, 3))
    torch.testing.assert_close(matrix(all_taps(resample.backward), size), backward, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize(("size", "out_size", "scale"), SIZES[:-1] + SCALES)
def test_ranks_together_are_the_whole(kind: Any, size: int, out_size: int, scale: float | None) -> None:
    resample = Resample(kind, size, out_size, scale)
    whole = matrix(all_taps(resample), size)
    split = split_resample(resample, (0, size // 3, size - 2, size))
    assert split is not None
    for (lo, hi), share in zip(split.windows, split.shares, strict=True):
        part = torch.zeros(share[1] - share[0], hi - lo, dtype=torch.float64)
        for places, weights in tap_columns(resample, share, lo):
            for row, place, weight in zip(part, places, weights, strict=True):
                row[place] += weight
        torch.testing.assert_close(part, whole[slice(*share), lo:hi], rtol=0, atol=0)
        assert whole[slice(*share)].abs().sum() == pytest.approx(float(part.abs().sum()))  # nothing outside


@pytest.mark.parametrize(
    ("kind", "factor", "align_corners", "native"),
    [
        ("nearest", 3, False, True),
        ("nearest-exact", 2, False, True),
        ("linear", 2, False, True),
        ("linear", 4, False, True),
        ("cubic", 2, False, True),
        ("linear", 2, True, False),
        ("linear-aa", 2, False, True),
    ],
)
def test_whole_factors_are_left_to_the_operator(kind: Any, factor: int, align_corners: bool, native: bool) -> None:
    split = split_resample(Resample(kind, 24, 24 * factor, None, align_corners), (0, 8, 16, 24))
    assert split is not None
    assert (split.computed is not None) == native
    assert split.bounds == (0, 8 * factor, 16 * factor, 24 * factor)


def test_bounds_scale_and_windows_overlap_only_where_read() -> None:
    split = split_resample(Resample("linear", 10, 15), (0, 5, 10))
    assert split is not None
    assert split.bounds == (0, 8, 15)
    assert split.windows == ((0, 6), (5, 10))
    assert split.computed is None


def test_fewer_outputs_than_ranks() -> None:
    assert split_resample(Resample("linear", 10, 2), (0, 3, 6, 10)) is None


def test_downscaled_windows_are_multiples_of_the_factor() -> None:
    split = split_resample(Resample("cubic", 24, 12), (0, 7, 24))
    assert split is not None
    assert split.computed is not None
    assert all(edge % 2 == 0 for edge in itertools.chain(*split.windows))

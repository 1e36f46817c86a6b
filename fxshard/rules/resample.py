r"""Resampling along one dimension: which input positions an output reads, and with which weights.

Every mode of ``torch.nn.functional.interpolate`` is linear and separable: along one dimension
``y[o] = sum_t w[o, t] * x[i[o, t]]``.  With ``q`` the input step of one output, ``r`` its real position::

    q = 1 / scale (a given scale_factor)   or in / out   or (in - 1) / (out - 1) with align_corners
    r = q (o + 1/2) - 1/2                                or q o              with align_corners

    nearest         i = floor(q o)                                          w = 1
    nearest-exact   i = floor(q (o + 1/2))                                  w = 1
    linear          i, i + 1              l = r - i                         w = 1 - l, l
    cubic           i - 1 ... i + 2       Keys' kernel, A = -0.75           clamped to the image
    linear-aa, cubic-aa, lanczos-aa       a kernel, stretched by q > 1, normalised over the image

    outputs of rank 1          [o0 ------------- o1)
    positions they read    [lo ------------------------ hi)       clamped only at the image's ends

The rounding of ATen's kernels is part of the map: a real position a hair below a whole number reads another
pixel.  So the same products are rounded to float32 where the kernels round (``UpSample.h``,
``cpu/UpSampleKernel.cpp``).  Pure numbers: no tensors, ranks or groups.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from fxshard.layout import Interval, spread_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind: TypeAlias = Literal["nearest", "nearest-exact", "linear", "cubic", "linear-aa", "cubic-aa", "lanczos-aa"]
Taps: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""The positions that one output reads, and their weights."""

TOLERANCE = 1e-11
"""How far two weights may differ and count as the same: far below 1e-9, far above rounding."""


@dataclass(frozen=True)
class Resample:
    """A resize along one dimension.

    Args:
        kind: The mode; ``-aa`` is with antialiasing.
        in_size: Input positions.
        out_size: Output positions.
        scale: The scale factor that the caller gave, which then counts in place of ``out_size / in_size``.
        align_corners: Whether the outer pixels' centres are matched in place of their edges.
        double: Whether nearest modes compute in float64.
        narrow_floor: Whether a float64 position is rounded to float32 before it is floored (ATen on a CPU); nearest
            modes then compute in float64 or float32, as the whole image's memory format and size decide.
    """

    kind: Kind
    in_size: int
    out_size: int
    scale: float | None = None
    align_corners: bool = False
    double: bool = False
    narrow_floor: bool = False

    @property
    def step(self) -> float:
        """Input positions from one output to the next."""
        if self.align_corners:
            return (self.in_size - 1) / (self.out_size - 1) if self.out_size > 1 else 0.0
        return 1.0 / self.scale if self.scale is not None and self.scale > 0 else self.in_size / self.out_size

    @property
    def backward(self) -> Resample:
        """The map whose transpose ATen's backward applies: nearest modes compute in float32 there."""
        return replace(self, double=False)

    @property
    def kernels(self) -> tuple[Resample, ...]:
        """The maps that ATen's operator may apply to a part of the image."""
        if self.narrow_floor and self.kind.startswith("nearest"):
            return replace(self, double=False), replace(self, double=True)
        return (self,)

    @property
    def is_settled(self) -> bool:
        """Whether the operator applies this map whatever the rest of the image is like."""
        return all(all_taps(kernel) == all_taps(self) for kernel in self.kernels)

    @property
    def is_special(self) -> bool:
        """Whether some of ATen's kernels ignore the scale factor: the output is as large as the input or twice that."""
        factor, rest = divmod(self.out_size, self.in_size)
        return rest == 0 and factor in (1, 2) and self.scale not in (None, float(factor))

    def position(self, out: int) -> float:
        """Return where output ``out`` lies among the input positions."""
        return self.step * out if self.align_corners else self.step * (out + 0.5) - 0.5

    def taps(self, out: int) -> Taps:
        """Return what output ``out`` reads.

        Example:
            >>> Resample("linear", 4, 8).taps(1)
            ((0, 1), (0.75, 0.25))
        """
        if self.kind.startswith("nearest"):
            return (self._picked(out),), (1.0,)
        if self.kind == "linear":
            return self._linear(out)
        return self._cubic(out) if self.kind == "cubic" else self._antialiased(out)

    def _picked(self, out: int) -> int:
        shift = 0.5 if self.kind == "nearest-exact" else 0.0
        if not self.double:
            real = (out + shift) * _float32(self.step)
        else:
            real = max((out + shift) * self.step - shift, 0.0) + shift
        return min(math.floor(_float32(real)), self.in_size - 1)

    def _floored(self, real: float) -> tuple[int, float]:
        """Return the position at or below ``real``, and how far above it that is."""
        below = min(math.floor(_float32(real) if self.narrow_floor else real), self.in_size - 1)
        return below, min(max(real - below, 0.0), 1.0)

    def _linear(self, out: int) -> Taps:
        below, above = self._floored(max(self.position(out), 0.0))
        return (below, min(below + 1, self.in_size - 1)), (1.0 - above, above)

    def _cubic(self, out: int) -> Taps:
        below, t = self._floored(self.position(out))
        places = tuple(min(max(below + k, 0), self.in_size - 1) for k in (-1, 0, 1, 2))
        return places, tuple(keys_kernel(abs(t - k), -0.75) for k in (-1, 0, 1, 2))

    def _antialiased(self, out: int) -> Taps:
        radius, kernel = ANTIALIASING[self.kind]
        stretch = max(self.step, 1.0)
        centre, support = self.step * (out + 0.5), radius * stretch
        first = max(int(centre - support + 0.5), 0)
        most = math.ceil(support) * 2 + 1
        count = min(max(min(int(centre + support + 0.5), self.in_size) - first, 0), most)
        offsets = [(first + j - centre + 0.5) / stretch for j in range(count)]
        weights = [kernel(abs(x)) for x in offsets]
        total = sum(weights) or 1.0
        places = [min(first + j, first + count - 1) for j in range(most)]  # as many for every output
        return tuple(places), tuple([w / total for w in weights] + [0.0] * (most - count))


def _float32(value: float) -> float:
    """Return ``value`` rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def keys_kernel(x: float, a: float) -> float:
    """Return Keys' cubic convolution kernel at the distance ``x >= 0`` (Keys, 1981, with ``a`` for -1/2).

    Example:
        >>> keys_kernel(0.0, -0.5), keys_kernel(1.0, -0.5), keys_kernel(2.0, -0.5)
        (1.0, 0.0, 0.0)
    """
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def lanczos_kernel(x: float) -> float:
    """Return Lanczos' kernel with three lobes at the distance ``x >= 0``."""
    if x >= 3:
        return 0.0
    return 1.0 if x == 0 else 3 * math.sin(math.pi * x) * math.sin(math.pi * x / 3) / (math.pi * x) ** 2


ANTIALIASING: dict[Kind, tuple[float, Callable[[float], float]]] = {
    "linear-aa": (1.0, lambda x: max(1.0 - x, 0.0)),
    "cubic-aa": (2.0, lambda x: keys_kernel(x, -0.5)),
    "lanczos-aa": (3.0, lanczos_kernel),
}
"""The radius and kernel of each mode with antialiasing."""


@lru_cache(maxsize=256)
def all_taps(resample: Resample) -> tuple[Taps, ...]:
    """Return the taps of every output."""
    return tuple(resample.taps(out) for out in range(resample.out_size))


@dataclass(frozen=True)
class SplitResample:
    """A resize along a split dimension.

    Args:
        bounds: Who owns which outputs.
        windows: Which input positions each rank reads.
        computed: Which outputs the untouched operator makes of each rank's window, cut to the rank's own after
            it; None where the operator does not do on the window what it does on the image.
    """

    bounds: tuple[int, ...]
    windows: tuple[Interval, ...]
    computed: tuple[Interval, ...] | None

    @property
    def shares(self) -> tuple[Interval, ...]:
        """Which outputs each rank owns."""
        return tuple(itertools.pairwise(self.bounds))


@lru_cache(maxsize=256)
def split_resample(resample: Resample, bounds: tuple[int, ...]) -> SplitResample | None:
    """Return how a resize is split along a dimension, or None with fewer outputs than ranks.

    Args:
        resample: The resize along that dimension.
        bounds: Who owns which inputs.

    Example:
        >>> split = split_resample(Resample("linear", 8, 16), (0, 4, 8))
        >>> split.bounds, split.windows, split.computed
        ((0, 8, 16), ((0, 5), (3, 8)), ((0, 10), (6, 16)))
    """
    size, out_size = resample.in_size, resample.out_size
    out_bounds = spread_bounds([(2 * b * out_size + size) // (2 * size) for b in bounds])
    if out_bounds is None:
        return None
    shares = list(itertools.pairwise(out_bounds))
    windows = tuple(_read(resample, *share) for share in shares)
    if out_size % size == 0 or size % out_size == 0:
        step = max(size // out_size, 1)
        aligned = tuple((lo // step * step, -(-hi // step) * step) for lo, hi in windows)
        computed = tuple((lo * out_size // size, hi * out_size // size) for lo, hi in aligned)
        if all(map(_commutes, [resample] * len(shares), aligned, computed, shares)):
            return SplitResample(out_bounds, aligned, computed)
    return SplitResample(out_bounds, windows, None)


def _read(resample: Resample, lo: int, hi: int) -> Interval:
    rows = [*all_taps(resample)[lo:hi], *all_taps(resample.backward)[lo:hi]]
    return min(min(places) for places, _ in rows), max(max(places) for places, _ in rows) + 1


def _commutes(resample: Resample, window: Interval, computed: Interval, share: Interval) -> bool:
    """Whether resizing the window gives the outputs of ``share`` as resizing the image does."""
    if not computed[0] <= share[0] <= share[1] <= computed[1]:  # a scale factor that is not the sizes' reads elsewhere
        return False
    local = replace(resample, in_size=window[1] - window[0], out_size=computed[1] - computed[0])
    for whole, part in (*((resample, kernel) for kernel in local.kernels), (resample.backward, local.backward)):
        rows, local_rows = all_taps(whole), all_taps(part)
        if not all(_same(rows[o], local_rows[o - computed[0]], window[0]) for o in range(*share)):
            return False
    return True


def _same(taps: Taps, local_taps: Taps, shift: int) -> bool:
    found = dict.fromkeys(taps[0], 0.0)
    for place, weight in zip(*taps, strict=True):
        found[place] += weight
    for place, weight in zip(*local_taps, strict=True):
        found[place + shift] = found.get(place + shift, 0.0) - weight
    return all(abs(rest) <= TOLERANCE for rest in found.values())


def tap_columns(resample: Resample, share: Interval, start: int) -> Sequence[tuple[list[int], list[float]]]:
    """Return, for each tap, the positions and weights of the outputs of ``share`` in a window from ``start``."""
    rows = all_taps(resample)[share[0] : share[1]]
    count = len(rows[0][0])
    return [([places[t] - start for places, _ in rows], [weights[t] for _, weights in rows]) for t in range(count)]

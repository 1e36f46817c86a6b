"""Resizing: every mode of ``interpolate`` but area, along split dimensions with the global scale and offset.

The map along each dimension is :mod:`fxshard.rules.resample`'s.  Output bounds are the input's, scaled.  Per split
dimension, after the fetch of the input positions that a rank's outputs read:

native    integer factors: the untouched operator resizes the window; what the window's ends spoil is cut off
taps      any size: y = sum_t w_t * x[i_t] with constant indices and weights

    out  | 0 1 2 3 4 5 | 6 7 8 9 10 11 |       bilinear, factor 2
    in   |  0   1   2  |  3   4   5    |
    rank 0 holds 0..3, resizes to 0..7, keeps 0..5; it clamps at 0 as one device does, and at 3 in what is cut off

Dimensions that no axis splits are left to the untouched operator in every case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Interval, Placement, Replicate, Shard, Window
from fxshard.rules.reduce import LOW_PRECISION
from fxshard.rules.resample import Kind, Resample, all_taps, split_resample, tap_columns
from fxshard.rules.rule import Choice, Gather, Row, rule
from fxshard.rules.stencil import holding
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten

KINDS: dict[torch._ops.OpOverloadPacket, Kind] = {
    aten.upsample_nearest1d: "nearest",
    aten.upsample_nearest2d: "nearest",
    aten.upsample_nearest3d: "nearest",
    aten._upsample_nearest_exact1d: "nearest-exact",
    aten._upsample_nearest_exact2d: "nearest-exact",
    aten._upsample_nearest_exact3d: "nearest-exact",
    aten.upsample_linear1d: "linear",
    aten.upsample_bilinear2d: "linear",
    aten.upsample_trilinear3d: "linear",
    aten.upsample_bicubic2d: "cubic",
    aten._upsample_bilinear2d_aa: "linear-aa",
    aten._upsample_bicubic2d_aa: "cubic-aa",
}
"""The mode of each operator; it has the overloads ``default`` and ``vec``."""
if hasattr(aten, "_upsample_lanczos2d_aa"):  # torch 2.14
    KINDS[aten._upsample_lanczos2d_aa] = "lanczos-aa"

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

FIRST = 2
"""The first spatial dimension: every image is (N, C, ...)."""


def _scales(call: OpCall) -> list[float | None]:
    """Return the scale factor that the caller gave for each spatial dimension."""
    if "scale_factors" in call.arguments:
        return list(call["scale_factors"] or [None] * (len(call.out_shape) - FIRST))
    return [value for name, value in call.arguments.items() if name.startswith("scales")]


def _resamples(call: OpCall) -> dict[int, Resample]:
    """Return the map along each spatial dimension, with the rounding of the device that it runs on."""
    kind = KINDS[call.op.overloadpacket]
    x = tensor_value(call.inputs[0])
    wide = x.device.type == "cpu" and x.dtype == torch.float64
    double = wide and _computes_in_double(x, call.out_shape)
    return {
        FIRST + i: Resample(
            kind,
            x.shape[FIRST + i],
            call.out_shape[FIRST + i],
            scale,
            bool(call.arguments.get("align_corners")),
            double=double,
            narrow_floor=wide,
        )
        for i, scale in enumerate(_scales(call))
    }


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.ndim in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.ndim])


def _computes_in_double(x: torch.Tensor, out_shape: Sequence[int]) -> bool:
    """Whether ATen's nearest kernel on a CPU computes positions in float64 (``_use_vectorized_kernel_cond_2d``)."""
    if _is_channels_last(x) and x.shape[1] > 3:
        return False
    return x.ndim != 4 or sum(out_shape[FIRST:]) > 128


@rule(
    *(getattr(packet, name) for packet in KINDS for name in ("default", "vec")),
    emit=lambda *a: _emit_resize(*a),
    split_as=lambda *a: _split_resize(*a),
)
def place_resize(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch what a rank's outputs read of a split spatial dimension; leave a split batch or channel alone."""
    (image,) = at
    assert isinstance(image, Shard)
    if image.dim < FIRST:
        return Row((image,), (image,))
    if image.outer != 1:
        return Gather("the split dimension is a flattened one")
    reason = _refusal(call)
    if reason:
        return Gather(reason)
    resample = _resamples(call)[image.dim]
    split = split_resample(resample, image.bounds)
    if split is None:
        return Gather(f"{resample.out_size} output columns for {image.ranks} ranks")
    return Row((holding(image, Window(split.windows)),), (Shard(image.dim, split.bounds),))


def _refusal(call: OpCall) -> str:
    """Return why the operator's values cannot be had in parts; empty where they can."""
    resamples = _resamples(call).values()
    kind = KINDS[call.op.overloadpacket]
    special = next((r for r in resamples if r.is_special), None)
    if kind.endswith("-aa") and call.out_shape[-1] == 1:
        return "antialiasing to one column: ATen's kernel for CPUs gives every row the values of the first"
    if special is not None:
        return f"scale factor {special.scale} between sizes {special.in_size} and {special.out_size}"
    if not (tensor_value(call.inputs[0]).is_floating_point() or kind.startswith("nearest")):
        return "integer images are rounded by the operator"
    return ""


def _split_resize(call: OpCall, at: tuple[Placement, ...], wanted: Shard) -> Row | None:
    """Make a part of the output from a whole image, which every rank has: a pyramid's few pixels."""
    if wanted.dim < FIRST:
        return Row((wanted,), (wanted,))
    return Row((Replicate(),), (wanted,)) if wanted.outer == 1 and not _refusal(call) else None


@dataclass(frozen=True)
class _Part:
    """One dimension of what a rank does.

    Args:
        resample: The whole map.
        window: The inputs that the rank holds.
        share: The outputs that it owns.
        computed: The outputs that the untouched operator makes of the window; None where the taps do it.
        is_cut: Whether some rank cuts its share out of what is computed.
    """

    resample: Resample
    window: Interval
    share: Interval
    computed: Interval | None
    is_cut: bool = False


def _parts(emitter: Emitter, call: OpCall, plan: NodePlan) -> dict[int, _Part]:
    """Return what this rank does along each spatial dimension."""
    parts = {}
    for dim, resample in _resamples(call).items():
        share = (0, resample.out_size)
        parts[dim] = _Part(resample, (0, resample.in_size), share, share if resample.is_settled else None)
    for axis, shard in enumerate(plan.inputs[0]):
        if isinstance(shard, Shard) and shard.dim >= FIRST:
            split, coord = split_resample(parts[shard.dim].resample, shard.bounds), emitter.rank.coords[axis]
            assert split is not None
            computed = None if split.computed is None else split.computed[coord]
            is_cut = split.computed not in (None, split.shares)
            part = parts[shard.dim]
            parts[shard.dim] = _Part(part.resample, split.windows[coord], split.shares[coord], computed, is_cut)
    for axis, (have, made) in enumerate(zip(plan.inputs[0], plan.outputs[0], strict=True)):
        if isinstance(have, Replicate) and isinstance(made, Shard):
            share = made.interval(emitter.rank.coords[axis])
            parts[made.dim] = _Part(parts[made.dim].resample, parts[made.dim].window, share, None)
    return parts


def _emit_resize(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit the untouched operator for the dimensions that it can do, then the taps of the others."""
    y, parts = inputs[0], _parts(emitter, call, plan)
    by_taps = {dim: part for dim, part in parts.items() if part.computed is None}
    dtype = tensor_value(y).dtype
    widened = bool(by_taps) and dtype in LOW_PRECISION
    if widened:
        y = emitter.call(aten._to_copy.default, y, dtype=torch.float32)
    if len(by_taps) < len(parts):
        y = _native(emitter, call, y, parts)
    for dim, part in by_taps.items():
        y = _by_taps(emitter, part, y, dim)
    if widened:
        y = emitter.call(aten._to_copy.default, y, dtype=dtype)
    return _in_memory_order(emitter, call, y) if by_taps else y


def _native(emitter: Emitter, call: OpCall, x: Node, parts: dict[int, _Part]) -> Node:
    """Emit the operator on the window; a dimension that the taps resize keeps its size."""
    sizes, scales = [], _scales(call)
    for dim, part in parts.items():
        lo, hi = part.computed or part.window
        sizes.append(hi - lo)
        if part.computed is None:
            scales[dim - FIRST] = None
    corners = [call["align_corners"]] if "align_corners" in call.arguments else []
    y = emitter.call(call.op.overloadpacket.default, x, sizes, *corners, *scales)
    for dim, part in parts.items():
        if part.computed and part.is_cut:
            start, stop = (end - part.computed[0] for end in part.share)
            y = emitter.call(aten.slice.Tensor, y, dim, start, stop)
    return y


def _by_taps(emitter: Emitter, part: _Part, x: Node, dim: int) -> Node:
    """Emit the weighted sum of the positions that each output reads."""
    taken = _weighted(emitter, part, part.resample, x, dim)
    if all_taps(part.resample) == all_taps(part.resample.backward):
        return taken
    # ATen's backward picks other pixels than its forward here: the value of one with the gradient of the other
    returned = _weighted(emitter, part, part.resample.backward, x, dim)
    away = emitter.call(aten.sub.Tensor, taken, returned)
    return emitter.call(aten.add.Tensor, returned, emitter.call(aten.detach.default, away))


def _weighted(emitter: Emitter, part: _Part, resample: Resample, x: Node, dim: int) -> Node:
    total: Node | None = None
    for places, weights in tap_columns(resample, part.share, part.window[0]):
        indices = emitter.constant(x, places, -1, torch.int64)
        term = emitter.call(aten.index_select.default, x, dim, indices)
        if resample.kind.startswith("nearest"):
            return term
        term = emitter.call(aten.mul.Tensor, term, emitter.constant(x, weights, dim - tensor_value(x).ndim))
        total = term if total is None else emitter.call(aten.add.Tensor, total, term)
    assert total is not None
    return total


def _in_memory_order(emitter: Emitter, call: OpCall, y: Node) -> Node:
    """Emit the memory format that the untouched operator's output has."""
    value = call.output_values[0]
    assert value is not None
    if value.is_contiguous() or not _is_channels_last(value):
        return y
    return emitter.call(aten.contiguous.default, y, memory_format=CHANNELS_LAST[value.ndim])

r"""Transposed convolution, 1-D to 3-D: any kernel, stride, padding, output padding, dilation and groups.

    o[n, c, y] = sum of w[c', c, j] * x[n, c', i]   over   s*i - p + d*j = y

Input i paints the outputs from ``s*i - p`` to ``s*i - p + d*(k - 1)``; where s > d*(k - 1) + 1 there are outputs
that no input paints, and output padding adds more behind the last: they hold the bias.  A rank's outputs
[o0, o1) need the inputs that paint them, and the window reaches on, into the zeros outside the image, until what
it paints covers them::

    window        lo         ...        hi - 1
    painted       s*lo - p   ...        s*(hi - 1) - p + d*(k - 1)
    own           |<- margin ->[o0 ... o1)<- margin ->|

The local operator runs on the window without output padding; its own padding takes off the margin that every
rank has on both sides, a slice the rest.  Overlapping contributions are summed by the rank that owns the output.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fxshard.layout import Interval, Placement, Shard, Window, spread_bounds
from fxshard.rules.rule import Choice, Gather, Row, rule
from fxshard.rules.stencil import holding, per_dim, replicas
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten

TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


@dataclass(frozen=True)
class TransposedStencil:
    """One dimension of a transposed convolution.

    Args:
        stencil: The stencil of the convolution whose transpose it is.
    """

    stencil: Stencil

    def output_bounds(self, bounds: Sequence[int], out_size: int) -> tuple[int, ...] | None:
        """Return output bounds that follow the input's, or None with fewer outputs than ranks.

        Scaled by the stride where the output is that much larger; else an output belongs to the input in whose
        painted range it is most central.

        Args:
            bounds: Who owns which inputs.
            out_size: Output positions.

        Example:
            >>> TransposedStencil(Stencil(kernel=3, stride=2, padding=1)).output_bounds((0, 4, 9), 17)
            (0, 8, 17)
        """
        s = self.stencil
        if out_size == s.stride * bounds[-1]:
            inner = [s.stride * b for b in bounds[1:-1]]
        else:  # half-way between the centres s*i - p + reach/2 of inputs b - 1 and b
            inner = [(2 * s.stride * b - 2 * s.padding + s.reach - s.stride) // 2 + 1 for b in bounds[1:-1]]
        return spread_bounds((0, *(min(max(b, 0), out_size) for b in inner), out_size))

    def window(self, lo: int, hi: int) -> Interval:
        """Return the inputs that outputs ``[lo, hi)`` need, and those whose painted range reaches their ends.

        Example:
            >>> TransposedStencil(Stencil(kernel=3, stride=2, padding=1)).window(8, 18)
            (4, 10)
        """
        s = self.stencil
        first = min(-((s.reach - lo - s.padding) // s.stride), (lo + s.padding) // s.stride)
        last = max((hi - 1 + s.padding) // s.stride, -((s.reach - hi + 1 - s.padding) // s.stride))
        return first, last + 1

    def margins(self, window: Interval, lo: int, hi: int) -> tuple[int, int]:
        """Return how many outputs the window paints before ``lo`` and from ``hi`` on."""
        s = self.stencil
        first, last = s.stride * window[0] - s.padding, s.stride * (window[1] - 1) - s.padding + s.reach
        return lo - first, last + 1 - hi


def _geometry(call: OpCall) -> tuple[int, list[TransposedStencil]]:
    """Return the image's first spatial dimension and the stencil of each spatial dimension."""
    kernel = call.shape(1)[2:]
    dims = len(kernel)
    sizes = (per_dim(call[name], dims) for name in ("stride", "padding", "dilation"))
    stencils = [TransposedStencil(Stencil(k, s, p, d)) for k, s, p, d in zip(kernel, *sizes, strict=True)]
    return len(call.shape(0)) - dims, stencils


@rule(*TRANSPOSED, emit=lambda *a: emit_transposed(*a), enters=True)
def place_transposed(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch the inputs that paint a rank's outputs; leave a split batch alone."""
    image, rest = at[0], replicas(len(at) - 1)
    first, stencils = _geometry(call)
    if not isinstance(image, Shard) or image.dim == first - 1:
        return Gather("only batch and space of a transposed convolution can be split")
    if image.dim < first - 1:
        return Row((image.owned, *rest), (image.owned,))
    if image.outer != 1:
        return Gather("the split dimension is a flattened one")
    stencil, out_size = stencils[image.dim - first], call.out_shape[image.dim]
    bounds = stencil.output_bounds(image.bounds, out_size)
    if bounds is None:
        return Gather(f"{out_size} output columns for {image.ranks} ranks")
    window = Window(tuple(stencil.window(lo, hi) for lo, hi in itertools.pairwise(bounds)))
    return Row((holding(image, window), *rest), (Shard(image.dim, bounds),))


def emit_transposed(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    """Emit the operator on the window, and the cut to the rank's own outputs."""
    first, stencils = _geometry(call)
    dims = len(stencils)
    padding, extra = per_dim(call["padding"], dims), per_dim(call["output_padding"], dims)
    cuts: dict[int, Interval] = {}
    for axis, (image, out) in enumerate(zip(plan.inputs[0], plan.outputs[0], strict=True)):
        if isinstance(image, Shard) and isinstance(out, Shard) and image.dim >= first:
            i, coord = image.dim - first, emitter.rank.coords[axis]
            margins = [stencils[i].margins(image.interval(r), *out.interval(r)) for r in range(image.ranks)]
            padding[i], extra[i] = min(map(min, margins)), 0
            if any(margin != (padding[i], padding[i]) for margin in margins):
                start = margins[coord][0] - padding[i]
                cuts[image.dim] = (start, start + out.length(coord))
    args, kwargs = call.rebind(inputs, padding=padding, output_padding=extra)
    y = emitter.call(call.op, *args, **kwargs)
    for dim, (start, stop) in cuts.items():
        y = emitter.call(aten.slice.Tensor, y, dim, start, stop)
    return y

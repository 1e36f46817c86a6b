"""Convolution, 1-D to 3-D: any kernel, stride, padding, dilation and groups.

    o[n, c, y] = sum_{c', j} w[c, c', j] * x[n, c', s*y - p + d*j]

Split over a spatial dimension a rank needs the window ``[s*o0 - p, s*(o1-1) - p + d*(k-1) + 1)`` of the
input, zeros outside the image, and convolves it without padding.  Split over the batch it needs nothing.
The weight is replicated; its gradient is a partial sum, which the conversion's ``sum_gradient`` completes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fxshard.layout import Placement, Shard
from fxshard.rules.conv_transpose import emit_transposed, place_transposed
from fxshard.rules.rule import Choice, Expand, Gather, Row, rule
from fxshard.rules.stencil import per_dim, replicas, stencil_shards, unpadded
from fxshard.window import Stencil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.emitter import Emitter
    from fxshard.rules.call import OpCall
    from fxshard.values import NodePlan

aten = torch.ops.aten

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def _geometry(call: OpCall) -> tuple[int, list[Stencil]]:
    """Return the image's first spatial dimension and the stencil of each spatial dimension."""
    kernel = call.shape(1)[2:]
    dims = len(kernel)
    sizes = (per_dim(call[name], dims) for name in ("stride", "padding", "dilation"))
    stencils = [Stencil(k, s, p, d) for k, s, p, d in zip(kernel, *sizes, strict=True)]
    return len(call.shape(0)) - dims, stencils


@rule(*CONVOLUTIONS, emit=lambda *a: _emit_convolution(*a), enters=True)
def place_convolution(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Fetch the window of a split spatial dimension; leave a split batch alone."""
    return _place(call, at)


@rule(aten.convolution.default, emit=lambda *a: _emit_base_convolution(*a))
def place_base_convolution(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Place the form that decompositions use."""
    return place_transposed(call, at) if call["transposed"] else _place(call, at)


def _emit_base_convolution(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    emit = emit_transposed if call["transposed"] else _emit_convolution
    return emit(emitter, call, plan, inputs)


def _place(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    image, rest = at[0], replicas(len(at) - 1)
    first, stencils = _geometry(call)
    if not isinstance(image, Shard):
        return Gather("only the image of a convolution can be split")
    if image.dim < first - 1:
        return Row((image.owned, *rest), (image.owned,))
    if image.dim == first - 1:
        return Gather("a convolution reads all channels")
    shards = stencil_shards(image, stencils[image.dim - first], call.out_shape[image.dim])
    if isinstance(shards, Gather):
        return shards
    return Row((shards[0], *rest), (shards[1],))


def _emit_convolution(emitter: Emitter, call: OpCall, plan: NodePlan, inputs: Sequence[Node]) -> Node:
    first, stencils = _geometry(call)
    padding = unpadded([s.padding for s in stencils], plan, first)
    args, kwargs = call.rebind(inputs, padding=padding)
    return emitter.call(call.op, *args, **kwargs)


@rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def place_named_padding(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Rewrite padding "valid" and "same" with numbers."""
    convolution = dict(zip((1, 2, 3), CONVOLUTIONS, strict=True))[len(call.shape(1)) - 2]

    def program(  # the schema's argument names
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: str,
        dilation: Sequence[int],
        groups: int,
    ) -> Any:
        dims = weight.ndim - 2
        total = [0] * dims
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(per_dim(dilation, dims), weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):  # torch pads the odd column behind
            input = F.pad(input, [n for t in reversed(total) for n in (0, t % 2)])
        return convolution(input, weight, bias, stride, [t // 2 for t in total], dilation, groups)

    return Expand(program)

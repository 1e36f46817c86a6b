"""Strides: operators that read memory, not positions, are written as reads of positions.

``as_strided`` takes the elements ``offset + sum(i_d * stride_d)`` of its input's *storage*, which lie elsewhere where a
rank has a part of the input, or has gathered it.  Where the input is all that its storage has, they have positions::

    x (2, 3), strides (1, 2)     storage    x00 x10 x01 x11 x02 x12     =     flat = x.permute(1, 0).reshape(-1)
    as_strided(x, [2, 2], [3, 1], 1)        x10 x01 / x11 x02           =     flat[[1, 2, 4, 5]].reshape(2, 2)

A part of something larger, such as ``y[..., 1:]``, is refused: what stands around it in memory is no input of the
operator.  Writing through ``as_strided`` is captured as ``as_strided_scatter``, whose own gradient is wrong in torch
(2.11 and 2.14); written as positions it has the gradient of what the model does in eager mode.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from fxshard.errors import PlanError
from fxshard.ops.memory import fills_storage, inverse, memory_order
from fxshard.provenance import source_line
from fxshard.rules.rule import Choice, Expand, rule
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from fxshard.layout import Placement
    from fxshard.rules.call import OpCall

aten = torch.ops.aten
READERS = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten.resize.default,
    aten.resize_as.default,
)
WRITERS = (aten.as_strided_scatter.default,)


def storage_positions(size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device) -> Tensor:
    """Return where in a storage the elements of a strided tensor are, in order.

    Example:
        >>> storage_positions((2, 2), (3, 1), 1, torch.device("cpu"))
        tensor([1, 2, 4, 5])
    """
    found = torch.full([1] * len(size), offset, device=device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        along = [-1 if d == dim else 1 for d in range(len(size))]
        found = found + (torch.arange(length, device=device) * step).reshape(along)
    return found.reshape(-1)


def _flat(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.permute(tuple(order)).reshape(-1)


def _checked_order(call: OpCall, last: int) -> tuple[int, ...]:
    """Return the memory order of the input.

    Raises:
        PlanError: The input is not all of its storage, or the operator reads behind it.
    """
    value = tensor_value(call.inputs[0])
    if fills_storage(value) and last < value.numel():
        return memory_order(value)
    elements = value.untyped_storage().nbytes() // value.element_size()
    msg = (
        f"{call.op} reads memory around its input at {source_line(call.node) or call.node.format_node()}: shape "
        f"{tuple(value.shape)} with strides {tuple(value.stride())} is {value.numel()} of the {elements} elements of a "
        "storage, and no rank has the others. Use slices or unfold, or the strides of a copy (.contiguous())"
    )
    raise PlanError(msg)


def _last(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    return offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else -1


def refuse_nested_readers(node: Node) -> None:
    """Check that the graphs that a higher-order operator runs, such as the branches of ``cond``, read no memory.

    Args:
        node: A call of such an operator; its graphs are run as they are.

    Raises:
        PlanError: One does.
    """
    owner = node.graph.owning_module
    for graph in (n for n in node.all_input_nodes if n.op == "get_attr" and owner is not None):
        body = getattr(owner, str(graph.target), None)
        modules = body.modules() if isinstance(body, GraphModule) else ()
        inside = (n for module in modules if isinstance(module, GraphModule) for n in module.graph.nodes)
        reader = next((n for n in inside if n.target in (*READERS, *WRITERS)), None)
        if reader is not None:
            where = source_line(reader) or source_line(node)
            msg = (
                f"{reader.target} in {node.target} reads memory by strides at {where}, and a rank has other memory "
                f"than one device; read it before the {node.target}, or use slices or unfold"
            )
            raise PlanError(msg)


@rule(*READERS, nested=True, always=True)
def place_strided(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Read the positions that the strides name; those of the result where the call names none."""
    result = call.output_values[0]
    assert result is not None
    size, stride = call.out_shape, tuple(call.arguments.get("stride") or result.stride())
    offset = call.arguments.get("storage_offset") or 0
    order = _checked_order(call, _last(size, stride, offset))

    def program(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return _flat(x, order).index_select(0, storage_positions(size, stride, offset, x.device)).reshape(size)

    return Expand(program)


@rule(*WRITERS, nested=True, always=True)
def place_strided_scatter(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Write to the positions that the strides name."""
    size, stride, offset = tuple(call["size"]), tuple(call["stride"]), call["storage_offset"] or 0
    order = _checked_order(call, _last(size, stride, offset))
    shape = [call.shape(0)[d] for d in order]

    def program(x: Tensor, src: Tensor, *_: Any, **__: Any) -> Tensor:
        positions = storage_positions(size, stride, offset, x.device)
        written = _flat(x, order).index_copy(0, positions, src.reshape(-1))
        return written.reshape(shape).permute(inverse(order))

    return Expand(program)

"""A ``torch.autograd.Function`` of the user's own, spelled out for capture.

Dynamo hands over its two bodies, and capture would trace the first without gradients and lose the second::

    autograd_function_apply(forward, backward, x, w)
        ->  y, saved = forward(x, w)
            g = fxshard.cotangent(y);  gx, gw = backward(g, saved)
            fxshard.custom_gradient([y], [g], [x, w], [gx, gw])

:mod:`fxshard.ops.custom_gradient` has the markers.  Where nothing is differentiated only the forward is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.errors import CaptureError
from fxshard.passes.replace_random import draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    Run = Callable[..., Any]

ops = torch.ops.fxshard


def run_custom_function(forward: Run, backward: Run, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run both bodies of a function, marked, and return its outputs.

    Args:
        forward: Returns the outputs and what is saved.
        backward: Takes the gradients of the outputs and what was saved, returns the gradients of the inputs.
        inputs: The function's.
        options: What Dynamo says of the outputs.

    Raises:
        CaptureError: The function writes its input in place (``ctx.mark_dirty``).
    """
    if options.get("dirty_idx"):
        msg = "a torch.autograd.Function that writes its input (ctx.mark_dirty) is not supported; return a new tensor"
        raise CaptureError(msg)
    outputs, saved = forward(*inputs)
    if not torch.is_grad_enabled():
        return outputs
    constant = options["non_differentiable_idx"]
    active = [i for i, y in enumerate(outputs) if i not in constant and _floating(y)]
    with torch.no_grad():
        arriving = [ops.cotangent(y) if i in active else _zero(y) for i, y in enumerate(outputs)]
        gradients = backward(*arriving, *saved)
    given = [(x, g) for x, g in zip(inputs, gradients, strict=True) if isinstance(g, torch.Tensor) and _floating(x)]
    if not active or not given:
        return outputs
    cotangents = [arriving[i] for i in active]
    made = ops.custom_gradient([outputs[i] for i in active], cotangents, *map(list, zip(*given, strict=True)))
    results = dict(zip(active, made, strict=True))
    return tuple(results.get(i, y) for i, y in enumerate(outputs))


def _floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def refuse_draws(gm: fx.GraphModule) -> None:
    """Check that no custom backward draws random numbers: in the graph they would be drawn before the forward's.

    Args:
        gm: A captured graph.

    Raises:
        CaptureError: One does; the message has the user's line.
    """
    for marker in gm.graph.find_nodes(op="call_function", target=ops.custom_gradient.default):
        node = marker.prev
        while node is not marker.args[1][0]:
            if draws(node):
                msg = (
                    f"{node.format_node()} draws random numbers in the backward of a torch.autograd.Function, when all "
                    "draws of the forward are made; draw them in its forward and save them\n"
                    f"{node.meta.get('stack_trace', '').rstrip()}"
                )
                raise CaptureError(msg)
            node = node.prev

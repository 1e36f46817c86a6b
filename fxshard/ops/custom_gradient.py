"""Markers of a ``torch.autograd.Function`` of the user's own, whose backward is not the derivative of its forward.

Both bodies stand in the global graph, one after the other, so that the planner and the rules see plain operators::

    outputs = forward(inputs)                       in no_grad
    g = fxshard.cotangent(output)                   the gradient that will arrive, placed as the output
    gradients = backward(g, saved)                  in no_grad
    results = fxshard.custom_gradient(outputs, cotangents, inputs, gradients)

A replicated input gets its gradient whole, as the user's backward computes it: a sum over the image in it is reduced
like any other.  :mod:`fxshard.passes.wrap_gradients` moves what lies between the markers into a
:class:`CustomGradient`; neither marker is ever run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, fx


@torch.library.custom_op("fxshard::cotangent", mutates_args=(), schema="(Tensor output) -> Tensor")
def cotangent(output: Tensor) -> Tensor:
    """Stand for the gradient that arrives at ``output``, one of the outputs of a user's function.

    Args:
        output: A floating tensor.

    Raises:
        AssertionError: Always: it is a marker.
    """
    _never_run(output)


@cotangent.register_fake
def _(output: Tensor) -> Tensor:
    return torch.empty_like(output)


@torch.library.custom_op(
    "fxshard::custom_gradient",
    mutates_args=(),
    schema="(Tensor[] outputs, Tensor[] cotangents, Tensor[] inputs, Tensor[] gradients) -> Tensor[]",
)
def custom_gradient(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],  # noqa: ARG001  the graph says with them what the gradients depend on
    inputs: Sequence[Tensor],  # noqa: ARG001
    gradients: Sequence[Tensor],  # noqa: ARG001
) -> list[Tensor]:
    """Return ``outputs`` as functions of ``inputs`` that have these gradients.

    Args:
        outputs: What the user's forward computed.
        cotangents: For each output, the gradient that arrives.
        inputs: What the outputs are differentiated for.
        gradients: For each input, its gradient, computed from the cotangents.

    Raises:
        AssertionError: Always: it is a marker.
    """
    _never_run(outputs)


@custom_gradient.register_fake
def _(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    del cotangents, inputs, gradients
    return [torch.empty_like(output) for output in outputs]


def _never_run(_: object) -> NoReturn:
    msg = "a marker of a custom gradient was left in a graph that runs"
    raise AssertionError(msg)


class CustomGradient(torch.nn.Module):
    """Gives values that were computed without gradients the gradients that a graph computes.

    Args:
        backward_graph: Called with the gradients of the outputs and the captured values; returns those of the inputs.
        outputs: How many outputs there are.
        inputs: How many inputs there are.

    Example:
        >>> graph = torch.fx.symbolic_trace(lambda gradient, scale: (gradient * scale,))
        >>> x = torch.ones(2, requires_grad=True)
        >>> (y,) = CustomGradient(graph, 1, 1)(x.detach().round(), x, torch.tensor(3.0))
        >>> y.sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """

    def __init__(self, backward_graph: fx.GraphModule, outputs: int, inputs: int) -> None:
        super().__init__()
        self.backward_graph, self.outputs, self.inputs = backward_graph, outputs, inputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs.

        Args:
            tensors: The outputs without gradients, the inputs, and what the backward reads of the forward.
        """
        made: tuple[Tensor, ...] = _Attach.apply(self, *tensors)
        return made


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: CustomGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.of = of
        ctx.save_for_backward(*tensors[of.outputs + of.inputs :])
        return tuple(output.view_as(output) for output in tensors[: of.outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        captured, of = ctx.saved_tensors, ctx.of
        found = of.backward_graph(*gradients, *captured)
        return (None, *(None,) * of.outputs, *found, *(None,) * len(captured))

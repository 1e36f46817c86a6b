"""What torch has for one operator, one layer or one entry of its trace."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._logging import trace_structured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

get_data: Callable[[torch.Tensor], torch.Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""The node target of ``x.data`` in a Dynamo graph."""


set_data: Callable[..., Any] = getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)
"""The node target of ``x.data = y`` in a Dynamo graph: ``set_`` in 2.11, an operator of its own in 2.14."""


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The node target that opens and closes ``no_grad`` regions in a captured graph."""


def trace_artifact(name: str, encoding: str, write: Callable[[], str]) -> None:
    """Write an artifact of the current compilation to torch's structured trace, which ``tlparse`` reads.

    Args:
        name: Its name there.
        encoding: ``"string"`` or ``"json"``.
        write: Returns it; called only where there is a trace.
    """
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=write)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator is made of others on every device, gradient and all."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


@contextmanager
def unsynchronised_batch_norms() -> Iterator[None]:
    """Run every ``SyncBatchNorm`` as the batch norm that it is on one device.

    Its own collectives live in an autograd function that capture cannot see through; a plan takes the statistics over
    all ranks of the mesh anyway.
    """
    synchronised = torch.nn.SyncBatchNorm.forward
    torch.nn.SyncBatchNorm.forward = torch.nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.SyncBatchNorm.forward = synchronised  # type: ignore[method-assign]

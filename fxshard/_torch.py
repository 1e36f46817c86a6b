"""The private torch APIs that fxshard uses, each with its reason.

Everything here was run on torch 2.11 and 2.14; nothing else in the package imports a private name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._functorch.aot_autograd import aot_export_module
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import (
    _get_default_store,  # the handshake needs the store that rendezvous used, not a collective that could hang
    _get_default_timeout,
    _world,  # all process groups
)
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

get_data: Callable[[torch.Tensor], torch.Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""The node target of ``x.data`` in a Dynamo graph."""
set_data: Callable[..., Any] = getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)
"""The node target of ``x.data = y`` in a Dynamo graph: ``set_`` in 2.11, an operator of its own in 2.14."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The node target that opens and closes ``no_grad`` regions in a captured graph."""

__all__ = [
    "BackendCompilerFailed",  # what Dynamo wraps an error of a backend in
    "FakeTensor",  # shapes without storage
    "FakeTensorMode",
    "InternalTorchDynamoError",
    "Partitioned",
    "TorchRuntimeError",  # an operator that Dynamo meets refuses its inputs
    "TracingContext",
    "Unsupported",  # Dynamo met code that it cannot capture whole
    "UserError",
    "WeakTensorKeyDictionary",  # tensors compare elementwise, so the standard library's cannot hold them
    "_get_default_store",
    "_get_default_timeout",
    "aot_export_module",  # the only capture that is functional, pre-dispatch and keeps no_grad regions
    "autograd_function_apply",  # what Dynamo makes of a torch.autograd.Function
    "cache_key_tagged",
    "dead_draws_kept",
    "default_group_timeout",
    "detect_fake_mode",  # Dynamo's mode has to be reused, two modes do not mix
    "get_data",
    "get_torch_obj_rule_map",  # Dynamo's rules for torch's functions, by identity: built before one is replaced
    "group_exists",
    "is_composite",
    "is_fx_symbolic_tracing",  # a tracer runs a class's forward, past what an object has of its own
    "is_module_state",
    "lookup_backend",  # any Dynamo backend by name; torch.compile would capture a second time
    "make_fx",
    "partitioned",
    "preserve_node_meta",
    "register_inductor_decomposition",
    "set_data",
    "set_grad_enabled",
    "tag_activation_checkpoint",  # what Dynamo makes of torch.utils.checkpoint
    "unfunctionalized",
    "unsynchronised_batch_norms",
    "whole_graphs",
]


def is_module_state(placeholder: torch.fx.Node, example: object) -> bool:
    """Return whether a Dynamo graph's placeholder is a parameter or buffer of a module.

    Dynamo names the origin of each placeholder in ``_dynamo_source``; a source that was reached through an
    ``nn.Module`` has a guard source that says so.

    Args:
        placeholder: A placeholder of the graph that Dynamo hands to a backend.
        example: Its example input.
    """
    if isinstance(example, torch.nn.Parameter):
        return True
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return False
    guard_source = source.guard_source
    kind = guard_source() if callable(guard_source) else guard_source  # a method in 2.11, a property in 2.14
    return bool(kind.is_unspecialized_nn_module() or kind.is_unspecialized_builtin_nn_module())


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator is made of others on every device, gradient and all."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def default_group_timeout() -> timedelta | None:
    """Return how long a collective of the default group waits, which its user chose; None where it does not say."""
    group = torch.distributed.group.WORLD
    device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None) if group is not None else None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def group_exists(name: str) -> bool:
    """Return whether a process group of this name is there: it goes when the default group is destroyed."""
    return name in _world.pg_names.values()


def unfunctionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` made functional, for tracing a decomposition below autograd."""
    return torch.func.functionalize(function)


def register_inductor_decomposition(op: torch._ops.OpOverload, lowering: Callable[..., Any]) -> None:
    """Let Inductor replace ``op`` by ``lowering`` when it traces, after autograd; the first registration stays."""
    from torch._inductor.decomposition import decompositions, register_decomposition  # noqa: PLC0415  takes a second

    if op not in decompositions:
        register_decomposition(op)(lowering)


@dataclass(frozen=True)
class Partitioned:
    """A graph and its backward, as a backend would compile them.

    Args:
        forward: Returns the graph's outputs, then what the backward needs.
        backward: None where nothing needs a gradient.
        outputs: How many outputs of the forward are the graph's own.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None
    outputs: int


def partitioned(gm: torch.fx.GraphModule, inputs: Sequence[Any], inner_backend: str) -> Partitioned:
    """Return what AOTAutograd makes of a graph; nothing is compiled.

    Args:
        gm: A graph.
        inputs: Its inputs, fake; those that need a gradient say so.
        inner_backend: ``"inductor"`` decomposes operators before it partitions, others do not.
    """
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415  this and the next take a second
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415
    from torch._inductor import lowering  # noqa: F401, PLC0415  some decompositions look it up
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    found: list[Partitioned] = []

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        found.append(Partitioned(forward, backward, options["num_fwd_outputs"]))
        return forward, backward

    def compile_forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        if not found:
            found.append(Partitioned(graph, None, len(graph.graph.output_node().args[0])))  # type: ignore[arg-type]
        return graph.forward

    aot_autograd(
        fw_compiler=compile_forward,
        partition_fn=partition,
        decompositions=select_decomp_table() if inner_backend == "inductor" else {},
    )(gm, list(inputs))
    return found[0]


@contextmanager
def cache_key_tagged(tag: str) -> Iterator[None]:
    """Add ``tag`` to the key of torch's on-disk compile caches, which do not see our lowerings.

    Args:
        tag: Changes whenever compiled code of the same graph would differ.
    """
    from torch.compiler import config  # noqa: PLC0415  not imported by torch itself

    with config.patch(  # type: ignore[attr-defined]  # added to the module at import
        cache_key_tag=f"{config.cache_key_tag}{tag}"
    ):
        yield


def dead_draws_kept() -> AbstractContextManager[None]:
    """Return a context in which random operators are eager mode's.

    Capture keeps those whose result nobody uses (FX removes them otherwise while a tracing context is active), and
    Inductor calls ATen's kernels in place of its own generator.
    """
    from torch._inductor import config  # noqa: PLC0415  the import takes a second

    patched: AbstractContextManager[None] = config.patch(fallback_random=True)
    return patched


MOST_GRAPHS = 64
"""How many graphs of one ``forward`` are kept: one for each model of the class, input size, mode and backend."""


def whole_graphs() -> AbstractContextManager[None]:
    """Return a context in which a model is captured whole, for each size that it meets.

    Dynamo otherwise cuts the graph of a model inside DistributedDataParallel at the buckets before a backend sees
    it, and each piece would be gathered; it leaves recurrent layers out; and it gives up at the ninth graph of a
    function, which two models of one class share.
    """
    from torch._dynamo import config  # noqa: PLC0415  a submodule of its own

    limit = max(config.recompile_limit, MOST_GRAPHS)
    patched: AbstractContextManager[None] = config.patch(optimize_ddp=False, recompile_limit=limit, allow_rnn=True)
    return patched


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

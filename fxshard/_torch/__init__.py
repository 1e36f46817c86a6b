"""The private torch APIs that fxshard uses, each with its reason.

Everything here was run on torch 2.11 and 2.14.  What is more than an import is in the modules of this package, one for
each part of torch.  Elsewhere ``torch._ops``, for the type of an operator, and ``torch.utils._pytree`` are private.
"""

from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
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
)
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.weak import WeakTensorKeyDictionary

from fxshard._torch.compilers import (
    Partitioned,
    cache_key_tagged,
    dead_draws_kept,
    drop_cuda_graphs,
    lays_channels_last,
    memory_budget,
    mode_options,
    partitioned,
    recomputed_behind_collectives,
    register_inductor_decomposition,
    restart_compile_workers,
    watch_backward,
)
from fxshard._torch.dynamo import (
    End,
    breaks_so_far,
    compilation_number,
    graph_end,
    hand_on,
    is_module_state,
    static_shapes,
    whole_graphs,
)
from fxshard._torch.functions import CompiledFunction, watch_functions
from fxshard._torch.groups import (
    before_groups_end,
    collectives_started,
    default_group_timeout,
    group_exists,
    group_timeout,
)
from fxshard._torch.operators import (
    get_data,
    is_composite,
    set_data,
    set_grad_enabled,
    trace_artifact,
    unsynchronised_batch_norms,
)

__all__ = [
    "BackendCompilerFailed",  # what Dynamo wraps an error of a backend in
    "CompiledFunction",
    "End",
    "FailOnRecompileLimitHit",  # Dynamo keeps no more graphs of a function that is captured whole
    "FakeTensor",  # shapes without storage
    "FakeTensorMode",
    "InternalTorchDynamoError",
    "Partitioned",
    "TorchDynamoException",  # what Dynamo's errors have in common: the stack of the user's program
    "TorchRuntimeError",  # an operator that Dynamo meets refuses its inputs
    "TracingContext",
    "Unsupported",  # Dynamo met code that it cannot capture whole
    "UserError",
    "WeakTensorKeyDictionary",  # tensors compare elementwise, so the standard library's cannot hold them
    "_get_default_store",
    "_get_default_timeout",
    "aot_export_module",  # the only capture that is functional, pre-dispatch and keeps no_grad regions
    "autograd_function_apply",  # what Dynamo makes of a torch.autograd.Function
    "before_groups_end",
    "breaks_so_far",
    "cache_key_tagged",
    "collectives_started",
    "compilation_number",
    "dead_draws_kept",
    "default_group_timeout",
    "detect_fake_mode",  # Dynamo's mode has to be reused, two modes do not mix
    "drop_cuda_graphs",
    "get_data",
    "get_torch_obj_rule_map",  # Dynamo's rules for torch's functions, by identity: built before one is replaced
    "graph_end",
    "group_exists",
    "group_timeout",
    "hand_on",
    "is_composite",
    "is_fx_symbolic_tracing",  # a tracer runs a class's forward, past what an object has of its own
    "is_module_state",
    "lays_channels_last",
    "lookup_backend",  # any Dynamo backend by name; torch.compile would capture a second time
    "make_fx",
    "memory_budget",
    "mode_options",
    "partitioned",
    "preserve_node_meta",
    "recomputed_behind_collectives",
    "register_inductor_decomposition",
    "restart_compile_workers",
    "set_data",
    "set_grad_enabled",
    "static_shapes",
    "tag_activation_checkpoint",  # what Dynamo makes of torch.utils.checkpoint
    "trace_artifact",
    "unsynchronised_batch_norms",
    "watch_backward",
    "watch_functions",
    "whole_graphs",
]

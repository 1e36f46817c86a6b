"""The private torch APIs that fxshard uses, each with its reason.

Everything here was run on torch 2.11 and 2.14; nothing else in the package imports a private name.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._dynamo import callback_handler
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.eval_frame import innermost_backend
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
from torch._dynamo.utils import graph_break_reasons, register_hook_for_recompile_user_context
from torch._functorch.aot_autograd import aot_export_module
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._logging import trace_structured
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
    from traceback import FrameSummary
    from types import CodeType, FrameType

get_data: Callable[[torch.Tensor], torch.Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""The node target of ``x.data`` in a Dynamo graph."""
set_data: Callable[..., Any] = getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)
"""The node target of ``x.data = y`` in a Dynamo graph: ``set_`` in 2.11, an operator of its own in 2.14."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The node target that opens and closes ``no_grad`` regions in a captured graph."""

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
    "breaks_so_far",
    "cache_key_tagged",
    "collectives_started",
    "compilation_number",
    "dead_draws_kept",
    "default_group_timeout",
    "detect_fake_mode",  # Dynamo's mode has to be reused, two modes do not mix
    "get_data",
    "get_torch_obj_rule_map",  # Dynamo's rules for torch's functions, by identity: built before one is replaced
    "graph_end",
    "group_exists",
    "group_timeout",
    "is_composite",
    "is_fx_symbolic_tracing",  # a tracer runs a class's forward, past what an object has of its own
    "is_module_state",
    "lays_channels_last",
    "lookup_backend",  # any Dynamo backend by name; torch.compile would capture a second time
    "make_fx",
    "partitioned",
    "preserve_node_meta",
    "recomputed_behind_collectives",
    "register_inductor_decomposition",
    "set_data",
    "set_grad_enabled",
    "static_shapes",
    "tag_activation_checkpoint",  # what Dynamo makes of torch.utils.checkpoint
    "trace_artifact",
    "unfunctionalized",
    "unsynchronised_batch_norms",
    "watch_backward",
    "watch_functions",
    "whole_graphs",
]


def trace_artifact(name: str, encoding: str, write: Callable[[], str]) -> None:
    """Write an artifact of the current compilation to torch's structured trace, which ``tlparse`` reads.

    Args:
        name: Its name there.
        encoding: ``"string"`` or ``"json"``.
        write: Returns it; called only where there is a trace.
    """
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=write)


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
    return None if group is None else group_timeout(group)


def group_timeout(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """Return how long a collective of a process group waits; None where the group does not say."""
    device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def collectives_started() -> int:
    """Return how many collectives this process has started, in all groups whose backend counts them."""
    return sum(_collectives_of(group) for group in list(_world.pg_map))


def _collectives_of(group: torch.distributed.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # a backend that does not count
        return 0


def watch_backward(outputs: Sequence[Any], failed: Callable[[Exception], None]) -> bool:
    """Let a backward that AOTAutograd compiled tell of what it raises, which no code around the forward sees.

    Its ``autograd.Function`` calls ``_backward_impl`` of the class; one of the outputs leads to it.

    Args:
        outputs: What a compiled forward returned.
        failed: Called with what the backward raises; what it raises itself comes in its place.

    Returns:
        Whether there is such a backward.
    """
    nodes = [o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    nodes += [n for node in nodes for n, _ in node.next_functions if n is not None]  # an output may be a view of one
    for function in (getattr(type(node), "_forward_cls", None) for node in nodes):
        run = getattr(function, "_backward_impl", None)
        if function is not None and run is not None:
            function._backward_impl = staticmethod(_telling(run, failed))
            return True
    return False


def _telling(run: Callable[..., Any], failed: Callable[[Exception], None]) -> Callable[..., Any]:
    def told(*args: Any) -> Any:
        try:
            return run(*args)
        except Exception as error:
            failed(error)
            raise

    return told


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


def lays_channels_last(forward: torch.fx.GraphModule, *, is_inference: bool) -> bool:
    """Return whether Inductor, on a GPU, lays the channels of all images last for the sake of convolutions.

    Args:
        forward: What it compiles, from :func:`partitioned`.
        is_inference: Whether there is no backward.
    """
    from torch._inductor.graph import GraphLowering  # noqa: PLC0415  takes a second

    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # with it, on a CPU, it always does
    try:
        return GraphLowering.decide_layout_opt(forward, is_inference=is_inference)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


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


def recomputed_behind_collectives() -> AbstractContextManager[None]:
    """Return a context in which a partitioner may recompute what is read again behind a kernel that nothing joins.

    By default such a value is kept.  In a batch norm, the collective of the statistics is such a kernel: ``x - mean``,
    in single precision, was kept beside ``x`` in half precision.
    """
    from torch._functorch import config  # noqa: PLC0415

    patch: AbstractContextManager[None] = config.patch(ban_recompute_used_far_apart=False)
    return patch


def dead_draws_kept() -> AbstractContextManager[None]:
    """Return a context in which random operators are eager mode's.

    Capture keeps those whose result nobody uses (FX removes them otherwise while a tracing context is active), and
    Inductor calls ATen's kernels in place of its own generator.
    """
    from torch._inductor import config  # noqa: PLC0415  the import takes a second

    patched: AbstractContextManager[None] = config.patch(fallback_random=True)
    return patched


MOST_GRAPHS = 64
"""How many graphs of one function are kept: one for each input size, mode and set of frozen parameters."""


def whole_graphs() -> AbstractContextManager[None]:
    """Return a context in which a model is captured whole, for each size that it meets.

    Dynamo otherwise cuts the graph of a model inside DistributedDataParallel at the buckets before a backend sees
    it, and each piece would be gathered; and it leaves recurrent layers out.
    """
    return _patched(optimize_ddp=False, allow_rnn=True)


def static_shapes() -> AbstractContextManager[None]:
    """Return a context in which Dynamo captures each size and number as it is, as ``dynamic=False`` has it do.

    It otherwise makes symbols of them at the second size.
    """
    return _patched(automatic_dynamic_shapes=False, assume_static_by_default=True)


def _patched(**options: bool) -> AbstractContextManager[None]:
    """Return a context in which Dynamo compiles a function anew for all that a plan depends on.

    It otherwise gives up at the ninth graph of a function, which then runs as it is; and in 2.11 it does not look at
    a parameter that is frozen or thawed in place, whose gradient has to be summed or not.
    """
    from torch._dynamo import config  # noqa: PLC0415  a submodule of its own

    limit = max(config.recompile_limit, MOST_GRAPHS)
    patched: AbstractContextManager[None] = config.patch(
        {"recompile_limit": limit, "skip_tensor_guards_with_matching_dict_tags": False, **options}
    )
    return patched


class End(NamedTuple):
    """Where a graph ends, and why.

    Args:
        reason: Dynamo's words.
        stack: The user's frames, the innermost last.
        is_break: Whether the function goes on after it.
    """

    reason: str
    stack: Sequence[FrameSummary]
    is_break: bool


def graph_end(gm: torch.fx.GraphModule) -> End | None:
    """Return where a graph ends; None where Dynamo does not say.

    Args:
        gm: What Dynamo hands to a backend.
    """
    found = getattr(gm, "compile_subgraph_reason", None)
    return None if found is None else End(found.reason, found.user_stack, found.graph_break)


def breaks_so_far() -> list[End]:
    """Return the breaks of this process, also those before which nothing was captured."""
    return [End(found.reason, found.user_stack, is_break=True) for found in graph_break_reasons]


def compilation_number(gm: torch.fx.GraphModule) -> int:
    """Return which graph of its function this is, from 1; 0 where Dynamo does not say.

    Args:
        gm: What Dynamo hands to a backend.
    """
    found = getattr(gm.meta.get("dynamo_compile_id"), "frame_compile_id", None)
    return 0 if found is None else int(found) + 1


@dataclass(frozen=True)
class CompiledFunction:
    """A function that Dynamo is about to compile.

    Args:
        code: Of the function.
        backend: What compiles it.
        options: What the backend was given.
        is_whole: Whether it has to be captured whole, with ``fullgraph=True``: else it is an error.
        is_full: Returns whether Dynamo keeps no more graphs of it, under the limits of the moment.
    """

    code: CodeType
    backend: object
    options: dict[str, Any]
    is_whole: bool
    is_full: Callable[[], bool]


COMPILER = ("torch._dynamo.convert_frame", "_compile")
"""The function of Dynamo that compiles one function."""


def watch_functions(
    backend: Callable[..., Any], around: Callable[[CompiledFunction], AbstractContextManager[None]]
) -> None:
    """Enter a context around each compilation of a function for a backend, also where the backend is never called.

    Dynamo leaves a function to Python without a word when it has enough graphs of it, or cannot resume in a loop.  It
    calls a hook before it looks at its limits, and callbacks at the end, which ``torch.compiler.reset`` forgets.

    Args:
        backend: What ``torch.compile`` is given.
        around: Returns the context.  What it raises on entry is what the function's caller gets; it is left with what
            ended the compilation, and raises nothing else.
    """
    entered: list[AbstractContextManager[None]] = []
    handled: list[BaseException | None] = [None]  # the user's, where he calls a model in an except clause

    def begin() -> str:
        end()  # of one that ended before its callbacks
        handled[0] = sys.exc_info()[1]
        if end not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(end)
        function = _compiled_function()
        if function is not None and function.backend is backend:
            context = around(function)
            context.__enter__()
            entered.append(context)
        return ""

    def end(*_: object) -> None:
        ended = sys.exc_info()
        while entered:
            entered.pop().__exit__(*((None, None, None) if ended[1] is handled[0] else ended))

    register_hook_for_recompile_user_context(begin)


def _compiled_function() -> CompiledFunction | None:
    """Return the function whose compilation calls this; no hook is told, so it is read from the compiler's frame."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != COMPILER:
        frame = frame.f_back
    seen = {} if frame is None else frame.f_locals
    if not {"code", "compiler_fn", "one_graph", "cache_size", "compile_id"} <= seen.keys():
        return None
    backend = innermost_backend(seen["compiler_fn"])  # torch.compile's wrapper of what it was given
    return CompiledFunction(
        code=seen["code"],
        backend=getattr(backend, "compiler_fn", backend),
        options=getattr(backend, "kwargs", {}).get("options", {}),
        is_whole=bool(seen["one_graph"]),
        is_full=lambda: bool(exceeds_recompile_limit(seen["cache_size"], seen["compile_id"])[0]),
    )


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

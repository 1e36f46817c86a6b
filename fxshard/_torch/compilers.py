"""AOTAutograd and Inductor: what they make of a graph, and what they are told."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager


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


def memory_budget(part: float) -> AbstractContextManager[None]:
    """Return a context in which a partitioner keeps a part of what it would for the backward, and computes the rest.

    Args:
        part: More than 0, and 1 for all of it.
    """
    from torch._functorch import config  # noqa: PLC0415

    patch: AbstractContextManager[None] = config.patch(activation_memory_budget=part)
    return patch


def drop_cuda_graphs() -> None:
    """Drop what Inductor has recorded: a communicator of NCCL does not end while a CUDA graph has it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # not there where nothing was recorded
    if trees is not None:
        trees.reset_cudagraph_trees()


def restart_compile_workers() -> None:
    """End Inductor's processes that compile, which have the environment that they were started with; others follow."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.shutdown_compile_workers()


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of Inductor that one of ``torch.compile``'s modes stands for."""
    from torch._inductor import list_mode_options  # noqa: PLC0415  takes a second

    return dict(list_mode_options(mode)) if mode != "default" else {}


def dead_draws_kept() -> AbstractContextManager[None]:
    """Return a context in which random operators are eager mode's.

    Capture keeps those whose result nobody uses (FX removes them otherwise while a tracing context is active), and
    Inductor calls ATen's kernels in place of its own generator.
    """
    from torch._inductor import config  # noqa: PLC0415  the import takes a second

    patched: AbstractContextManager[None] = config.patch(fallback_random=True)
    return patched


def watch_backward(outputs: Sequence[Any], failed: Callable[[BaseException], None]) -> bool:
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


def _telling(run: Callable[..., Any], failed: Callable[[BaseException], None]) -> Callable[..., Any]:
    def told(*args: Any) -> Any:
        try:
            return run(*args)
        except BaseException as error:
            failed(error)
            raise

    return told

"""Capture: the graph that Dynamo hands to a backend becomes a functional ATen graph with global shapes.

Before::

    y = self.conv(x); y.relu_(); self.running.copy_(...)      modules, in-place code, no_grad regions

After::

    conv2d = aten.conv2d.default(x, weight, bias, ...)         pre-dispatch, functional
    relu = aten.relu.default(conv2d)
    return (new_running, relu)                                 buffer updates are the first outputs

``meta["val"]`` of each node is a fake tensor of global shape; ``gm.meta["fxshard_capture"]`` says which
outputs are buffer updates, which inputs need gradients and which are the model's own state.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import (
    FakeTensor,
    FakeTensorMode,
    aot_export_module,
    autograd_function_apply,
    dead_draws_kept,
    detect_fake_mode,
    is_module_state,
    preserve_node_meta,
    tag_activation_checkpoint,
)
from fxshard.errors import CaptureError, FxShardError, InternalError
from fxshard.passes.custom_functions import refuse_draws, run_custom_function
from fxshard.passes.hidden_writes import HiddenWrites, remove_copies
from fxshard.passes.spelled_out import METHODS, SPELLED_OUT
from fxshard.provenance import is_own_fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY = "fxshard_capture"
SOURCE = "_dynamo_source"
_region_numbers = itertools.count()
"""Of activation checkpoints: torch's partitioner keeps what a region hands to one of a higher number."""


@dataclass(frozen=True)
class Captured:
    """What capture knows besides the graph.

    Args:
        updates: For each leading output, the index of the input that it is the new value of.
        requires_grad: For each input, whether it needs a gradient.
        is_state: For each input, whether it is a parameter or buffer of the model.
        grad_enabled: Whether gradients are recorded where the graph begins.
        recorded: The inputs whose new value autograd knows how it was made: their history changes with it.
    """

    updates: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    is_state: tuple[bool, ...]
    grad_enabled: bool
    recorded: frozenset[int] = frozenset()

    @property
    def is_trained(self) -> bool:
        """Whether there is a backward."""
        return self.grad_enabled and any(self.requires_grad)


class _Runner(fx.Interpreter):
    """Runs a Dynamo graph node by node; a failure names the user's line.

    Args:
        graph_module: The graph.
        writes: Is told of every call.
    """

    def __init__(self, graph_module: fx.GraphModule, writes: HiddenWrites) -> None:
        super().__init__(graph_module)
        self.writes = writes

    def run(self, *inputs: Any) -> Any:  # type: ignore[override]  # of the options that fx gives it none is used
        """Run the graph."""
        with self.writes.inside(self):
            return super().run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, the region of an activation checkpoint inline with its nodes marked for recomputation."""
        try:
            return super().run_node(n)
        except FxShardError:
            raise
        except Exception as error:
            msg = f"{n.target} cannot be captured: {_said(error)}\n{n.meta.get('stack_trace', '').rstrip()}"
            raise _kind_of(error)(msg) from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target, spelled out; of a checkpoint, its region; of a custom function, its bodies."""
        if target is autograd_function_apply:
            forward, backward, *inputs = args
            run, run_backward = (_Runner(body, self.writes).run for body in (forward, backward))
            return run_custom_function(run, run_backward, tuple(inputs), kwargs)
        if target is not tag_activation_checkpoint:
            with self.writes.around((args, kwargs)):
                return super().call_function(SPELLED_OUT.get(target, target), args, kwargs)
        region, *inputs = args
        number = next(_region_numbers)
        for node in region.graph.nodes:
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number}
        return _Runner(region, self.writes).run(*inputs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a tensor's method, spelled out."""
        with self.writes.around((args, kwargs)):
            if target in METHODS and isinstance(args[0], torch.Tensor):
                return METHODS[target](*args, **kwargs)
            return super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module."""
        with self.writes.around((args, kwargs)):
            return super().call_module(target, args, kwargs)


class _Inlined(torch.nn.Module):
    """Runs the Dynamo graph, so that capture sees its operators."""

    def __init__(self, graph_module: fx.GraphModule, writes: HiddenWrites) -> None:
        super().__init__()
        self.writes = writes
        self.runner = [_Runner(graph_module, writes)]  # in a list: its parameters are not this module's

    def forward(self, *inputs: Any) -> Any:
        self.writes.begin(inputs)
        return self.runner[0].run(*inputs)


def concrete(value: object) -> object:
    """Return ``value`` with a symbolic size made a number, which Dynamo then guards on."""
    return int(value) if isinstance(value, torch.SymInt) else value


def _fake(value: object, mode: FakeTensorMode) -> object:
    if not isinstance(value, torch.Tensor):
        return concrete(value)
    if isinstance(value, FakeTensor):
        sizes, strides = [int(s) for s in value.shape], [int(s) for s in value.stride()]
        with mode:
            made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)
    return mode.from_tensor(value, static_shapes=True)


def _specialize(gm: fx.GraphModule) -> None:
    """Make Dynamo guard on every size: a plan is for one shape, another one compiles again."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            concrete(size)


def _tidy(graph: fx.Graph) -> None:
    """Erase what does nothing in a functional graph."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # what .to() checks of its global input
            graph.erase_node(node)
        elif node.target is torch.ops.aten.clone.default and not node.kwargs:
            (copied,) = node.args
            if copied.target is torch.ops.aten.dropout.default:  # a copy to write to (fxshard.passes.spelled_out)
                node.replace_all_uses_with(copied)
                graph.erase_node(node)


@contextmanager
def _of_no_library() -> Iterator[None]:
    """Let operators be captured as on every device: on a GPU, a batch norm is an operator of cuDNN's otherwise.

    What runs is the inner backend's choice, or the operator's own: a convolution stays one of cuDNN's.
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


def _kind_of(error: Exception) -> type[FxShardError]:
    """Return what an error is raised as: what fxshard's own code raises, that is not an error of its own, is a bug."""
    return InternalError if is_own_fault(error) else CaptureError


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the functional ATen graph of a Dynamo graph, with global shapes.

    Args:
        gm: What Dynamo hands to a backend.
        example_inputs: Its inputs, real or fake.

    Returns:
        A graph module with the same inputs; its outputs are the buffer updates, then the outputs of ``gm``.

    Raises:
        CaptureError: The graph has an operator that cannot be made functional; the message has the user's line.
        InternalError: A bug of fxshard.
    """
    _specialize(gm)
    mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [_fake(value, mode) for value in example_inputs]
    writes = HiddenWrites(gm)
    try:
        with preserve_node_meta(), mode, dead_draws_kept(), _of_no_library():
            captured, signature = aot_export_module(_Inlined(gm, writes), fakes, trace_joint=False, pre_dispatch=True)
    except FxShardError:
        raise
    except Exception as error:
        msg = f"the model cannot be captured as a functional graph: {_said(error)}\nTORCHDYNAMO_VERBOSE=1 shows where"
        raise _kind_of(error)(msg) from error
    assert isinstance(captured, fx.GraphModule)
    refuse_draws(captured)
    remove_copies(captured)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for ours, theirs in zip((n for n in captured.graph.nodes if n.op == "placeholder"), placeholders, strict=True):
        if hasattr(theirs, SOURCE):  # inner backends read from it which inputs are the model's own
            setattr(ours, SOURCE, getattr(theirs, SOURCE))
    _tidy(captured.graph)
    names = list(signature.user_inputs)
    captured.meta[KEY] = Captured(
        updates=tuple(names.index(target) for target in signature.user_inputs_to_mutate.values()),
        requires_grad=tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in example_inputs),
        is_state=tuple(is_module_state(p, v) for p, v in zip(placeholders, example_inputs, strict=True)),
        grad_enabled=torch.is_grad_enabled(),
        recorded=frozenset(writes.recorded),
    )
    return captured

"""What a training step keeps on one rank's device: a prediction from the rank's own graphs, without running them.

The local graph goes through the partitioner of the inner backend, which decides what the forward keeps for the
backward.  The two graphs are then walked with a count of the bytes that are alive::

    alive at a node  =  parameters and buffers, inputs        all the time
                      + what the forward keeps                until the backward has used it
                      + gradients                             from where they are computed
                      + what nodes hand to one another        from the node to its last reader

                      + a convolution's workspace             while it runs: :mod:`fxshard.workspaces`

A view has no memory of its own.  Inductor does not write a pointwise result that only pointwise operators and
reductions read; other backends write every result.  The allocator's rounding is not counted.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fxshard._torch import Partitioned, lays_channels_last, partitioned
from fxshard.errors import PlanError
from fxshard.passes.capture import KEY, Captured
from fxshard.passes.lower import partition_rules, register_decompositions, without_autocast
from fxshard.passes.outline import copied
from fxshard.passes.pipeline import executable
from fxshard.provenance import module_path
from fxshard.values import depends_on_data
from fxshard.workspaces import workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fxshard.passes.config import Config

FUSING = "inductor"
"""The backend that joins pointwise operators into kernels."""
_REDUCING = ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
_POINTWISE = ("convert_element_type", "_to_copy", "clone", "full", "full_like", "zeros_like", "constant_pad_nd", "iota")
"""What is generated like a pointwise operator and has no such tag."""
_SAME_MEMORY = ("wait_tensor", "copy_", "_unsafe_view")
_IN_PLACE = ("all_reduce",)
"""What takes the place of its input where nobody else reads that."""


@dataclass(frozen=True)
class Moment:
    """The memory at one node.

    Args:
        phase: ``"forward"`` or ``"backward"``.
        node: The name of the operator that runs.
        bytes: What is alive while it does.
        module: The module that runs it, or whose gradients it computes; empty where it is not known.
    """

    phase: str
    node: str
    bytes: int
    module: str = ""


@dataclass(frozen=True)
class Memory:
    """What one rank keeps in a step.

    Args:
        state_bytes: Parameters and buffers.
        input_bytes: The inputs, as they are passed.
        gradient_bytes: Of parameters and inputs.
        saved_bytes: What the forward keeps for the backward, without the state and the inputs.
        timeline: In the order in which operators run.

    Example:
        >>> print(Memory(4 << 20, 1 << 20, 4 << 20, 7 << 20, (Moment("backward", "mm", 12 << 20),)))
        peak 12.00 MiB, in the backward at mm
          parameters and buffers      4.00 MiB
          inputs                      1.00 MiB
          kept for the backward       7.00 MiB
          gradients                   4.00 MiB
    """

    state_bytes: int
    input_bytes: int
    gradient_bytes: int
    saved_bytes: int
    timeline: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """Where most is alive."""
        return max(self.timeline, key=lambda moment: moment.bytes)

    def __str__(self) -> str:
        peak = self.peak
        rows = {
            "parameters and buffers": self.state_bytes,
            "inputs": self.input_bytes,
            "kept for the backward": self.saved_bytes,
            "gradients": self.gradient_bytes,
        }
        lines = [f"peak {size_text(peak.bytes)}, in the {peak.phase} at {peak.node}"]
        return "\n".join(lines + [f"  {name:<24}{size_text(count):>12}" for name, count in rows.items()])


def predict_memory(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> Memory:
    """Return what ``config.rank`` keeps in a step.

    Args:
        planned: The global graph.
        local: What it was rewritten to for the rank.
        config: Names the inner backend.

    Raises:
        PlanError: A size depends on data.
    """
    if any(map(depends_on_data, planned.graph.nodes)):
        msg = "the memory of a step cannot be predicted: sizes in the model depend on data"
        raise PlanError(msg)
    captured: Captured = planned.meta[KEY]
    graphs = step_graphs(captured, local, config)
    sizes = [_nbytes(node.meta.get("val")) for node in local.graph.find_nodes(op="placeholder")]
    state = sum(size for size, is_state in zip(sizes, captured.is_state, strict=True) if is_state)
    return _walked(graphs, state, sum(sizes) - state, fusing=config.inner_backend == FUSING)


def step_graphs(captured: Captured, local: fx.GraphModule, config: Config) -> Partitioned:
    """Return the forward and the backward that an inner backend would compile.

    Args:
        captured: Of the global graph.
        local: A rank's local graph; it is left as it is.
        config: Names the inner backend.
    """
    if config.inner_backend == FUSING:
        register_decompositions()
    inputs = [node.meta.get("val") for node in local.graph.find_nodes(op="placeholder")]
    needed = (needs and captured.grad_enabled for needs in captured.requires_grad)
    leaves = [_leaf(value, needs) for value, needs in zip(inputs, needed, strict=True)]
    runs = executable(copied(local), config=config)
    with without_autocast(), partition_rules(runs, config):
        return partitioned(runs, leaves, config.inner_backend)


def _leaf(value: Any, needs_grad: bool) -> Any:
    return value.detach().requires_grad_(needs_grad) if isinstance(value, torch.Tensor) else value


def _walked(graphs: Partitioned, state_bytes: int, input_bytes: int, *, fusing: bool) -> Memory:
    channels_last = fusing and lays_channels_last(graphs.forward, is_inference=graphs.backward is None)
    forward = _Walk(graphs.forward.graph, {}, {}, fusing=fusing, channels_last=channels_last)
    forward.sizes.update(dict.fromkeys(forward.inputs, 0))  # counted as state and inputs
    base = state_bytes + input_bytes
    timeline = [Moment("forward", n.name, base + size, module_path(n)) for n, size in forward.alive()]
    saved = forward.bytes_of(forward.outputs[graphs.outputs :])
    gradients = 0
    if graphs.backward is not None:
        known = {node.name: forward.roots(node) for node in forward.nodes}
        backward = _Walk(graphs.backward.graph, known, forward.sizes, fusing=fusing, channels_last=channels_last)
        timeline += [Moment("backward", n.name, base + size, module_path(n)) for n, size in backward.alive()]
        gradients = backward.bytes_of(backward.outputs)
    return Memory(state_bytes, input_bytes, gradients, saved, tuple(timeline))


class _Walk:
    """Counts what is alive while a graph runs.

    The *roots* of a node are the nodes whose memory its value lies in: itself, or what it is a view of.

    Args:
        graph: In the order in which it runs.
        known: The roots of inputs that another graph made, by name.
        sizes: The bytes of roots; it grows.
        fusing: Whether pointwise operators are joined into kernels.
        channels_last: Whether convolutions are given channels last whatever the graph says.
    """

    def __init__(
        self,
        graph: fx.Graph,
        known: dict[str, frozenset[fx.Node]],
        sizes: dict[fx.Node, int],
        *,
        fusing: bool,
        channels_last: bool,
    ) -> None:
        self.nodes = list(graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.outputs = [n for n in tree_leaves(self.nodes[-1].args) if isinstance(n, fx.Node)]
        self.sizes, self.fusing, self.channels_last = sizes, fusing, channels_last
        self._roots = {n: known[n.name] for n in self.inputs if n.name in known}

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes whose memory ``node`` is in."""
        if node not in self._roots:
            source = _memory_of(node)
            if source is None:
                self.sizes.setdefault(node, self._written_bytes(node))
            self._roots[node] = frozenset((node,)) if source is None else self.roots(source)
        return self._roots[node]

    def bytes_of(self, nodes: Iterable[fx.Node]) -> int:
        """Return the bytes that hold the values of ``nodes``."""
        return sum(self.sizes[root] for root in {root for node in nodes for root in self.roots(node)})

    def alive(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield each operator with the bytes that are alive while it runs."""
        ends = self._ends()
        now = self.bytes_of(self.inputs)
        for node in self.nodes:
            if node.op not in ("placeholder", "output") and node.target is not operator.getitem:
                made = [node, *(user for user in node.users if user.target is operator.getitem)]
                now += self.bytes_of(n for n in made if n in self.roots(n))
                yield node, now + workspace_bytes(node, channels_last=self.channels_last)
            now -= sum(self.sizes[root] for root in ends.get(node, ()))

    def _ends(self) -> dict[fx.Node, list[fx.Node]]:
        """Return, for each node, whose memory is free after it."""
        last = {node: node for node in self.nodes if node.op != "placeholder"}
        for node in self.nodes:
            last.update((root, node) for read in node.all_input_nodes for root in self.roots(read))
        ends: dict[fx.Node, list[fx.Node]] = {}
        lasting = {root for node in self.outputs for root in self.roots(node)}
        for root, node in last.items():
            if root not in lasting and root in self.sizes:
                ends.setdefault(node, []).append(root)
        return ends

    def _written_bytes(self, node: fx.Node) -> int:
        if self.fusing and _is_pointwise(node) and all(map(self._reads_inline, node.users)):
            return 0
        return _nbytes(node.meta.get("val"))

    def _reads_inline(self, node: fx.Node) -> bool:
        """Return whether a reader is joined with what it reads."""
        if _memory_of(node) is not None:
            return all(map(self._reads_inline, node.users))
        return _is_pointwise(node) or _name(node) in _REDUCING


def _memory_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory the value of ``node`` is in, if that is not its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if node.target is operator.getitem:
        return first if _memory_of(first) is not None else None
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    in_place = _name(node) in _IN_PLACE and len(first.users) == 1
    return first if is_view or in_place or _name(node) in _SAME_MEMORY else None


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or _name(node) in _POINTWISE)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def size_text(count: int) -> str:
    """Return a number of bytes as allocators count them: ``"12.00 MiB"``."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((name for name, size in units.items() if count >= size), "KiB")
    return f"{count / units[unit]:.2f} {unit}"


def _nbytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0

"""Builds one rank's local graph: every emitted node has its local fake value and its origin.

The local program of every rank has the same nodes in the same order; only the integers in it differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

import fxshard.ops  # noqa: F401  defines torch.ops.fxshard
from fxshard.values import ORIGIN, tensor_value
from fxshard.window import Exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

    from fxshard._torch import FakeTensorMode
    from fxshard.layout import Layout, Shard, Window

ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")
RECOMPUTE_KEYS = ("recompute", "ac_graph_id")
"""What an activation checkpoint writes on its nodes, for the inner backend's partitioner."""
DRAWS = (torch.ops.fxshard.random.default, torch.ops.fxshard.keep_draws.default)
"""Never recomputed: they would draw again."""


@dataclass(frozen=True)
class Rank:
    """Where the graph is for.

    Args:
        coords: The rank's coordinate on each mesh axis.
        groups: The name of the process group of each mesh axis.
    """

    coords: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass
class Emitter:
    """Adds nodes to a local graph.

    Args:
        graph: The graph that grows.
        rank: Whose graph it is.
        fake_mode: The mode that local values are made in.
        origin: The global node that is being emitted; its source location goes to what is emitted.
    """

    graph: Graph
    rank: Rank
    fake_mode: FakeTensorMode
    origin: Node | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Emit ``target(*args, **kwargs)`` and return its node with the local fake value in ``meta["val"]``."""
        node = self.graph.call_function(target, args, kwargs)
        self.adopt(node)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def adopt(self, node: Node) -> None:
        """Give ``node`` the source location of the global node that is being emitted."""
        if self.origin is not None:
            node.meta[ORIGIN] = self.origin.name
            keys = ORIGIN_KEYS if node.target in DRAWS else ORIGIN_KEYS + RECOMPUTE_KEYS
            node.meta.update({k: self.origin.meta[k] for k in keys if k in self.origin.meta})

    def local_shape(self, shape: Sequence[int], layout: Layout) -> list[int]:
        """Return this rank's shape of a tensor of global ``shape``."""
        return list(layout.local_shape(shape, self.rank.coords))

    def all_reduce(self, x: Node, axis: int, op: str = "sum") -> Node:
        """Emit Partial -> Replicate on ``axis``."""
        return self.call(torch.ops.fxshard.all_reduce.default, x, op, self.rank.groups[axis])

    def sum_gradient(self, x: Node, axis: int) -> Node:
        """Emit the identity whose backward sums the gradient over ``axis``."""
        return self.call(torch.ops.fxshard.sum_gradient.default, x, self.rank.groups[axis])

    def all_gather(self, x: Node, axis: int, shard: Shard) -> Node:
        """Emit Shard -> Replicate on ``axis``."""
        length = shard.length(self.rank.coords[axis])
        outer = tensor_value(x).shape[shard.dim] // length if length else shard.outer
        return self._part(torch.ops.fxshard.all_gather.default, x, axis, shard, outer)

    def slice(self, x: Node, axis: int, shard: Shard) -> Node:
        """Emit Replicate -> Shard on ``axis``."""
        outer = tensor_value(x).shape[shard.dim] // shard.size
        return self._part(torch.ops.fxshard.slice.default, x, axis, shard, outer)

    def _part(self, op: Any, x: Node, axis: int, shard: Shard, outer: int) -> Node:
        bounds = list(shard.bounds)
        return self.call(op, x, shard.dim, bounds, outer, self.rank.coords[axis], self.rank.groups[axis])

    def redistribute(self, x: Node, axis: int, source: Shard, target: Shard) -> Node:
        """Emit Shard(a) -> Shard(b) on ``axis``, between two dimensions."""
        return self.call(
            torch.ops.fxshard.redistribute.default,
            x,
            source.dim,
            list(source.bounds),
            target.dim,
            list(target.bounds),
            self.rank.coords[axis],
            self.rank.groups[axis],
        )

    def fetch(self, x: Node, axis: int, shard: Shard, window: Window) -> Node:
        """Emit what brings each rank its ``window`` of the dimension that ``shard`` splits.

        A halo exchange, or local slices where no rank needs anything of another and nothing is filled in.
        """
        exchange = Exchange(shard.bounds, window)
        if exchange.is_identity:
            return x
        coord = self.rank.coords[axis]
        if exchange.is_local and all(0 <= lo <= hi <= shard.size for lo, hi in window.intervals):
            lo, hi = (end - shard.bounds[coord] for end in window.intervals[coord])
            return self.call(torch.ops.aten.slice.Tensor, x, shard.dim, lo, hi)
        return self.call(
            torch.ops.fxshard.halo_exchange.default,
            x,
            shard.dim,
            list(shard.bounds),
            [lo for lo, _ in window.intervals],
            [hi for _, hi in window.intervals],
            window.fill.mode,
            window.fill.value,
            coord,
            self.rank.groups[axis],
        )

    def cut(self, x: Node, axis: int, shard: Shard, window: Window) -> Node:
        """Emit this rank's ``window`` of a whole tensor, filled with the window's constant outside; no gradient."""
        lo, hi = window.intervals[self.rank.coords[axis]]
        start, stop = (min(max(end, 0), shard.size) for end in (lo, hi))
        before = min(max(-lo, 0), hi - lo)
        behind = hi - lo - before - (stop - start)
        part = self.call(torch.ops.aten.slice.Tensor, x, shard.dim, start, stop)
        padding = [*[0, 0] * (tensor_value(x).ndim - 1 - shard.dim), before, behind]
        return self.call(torch.ops.aten.constant_pad_nd.default, part, padding, window.fill.value)

    def constant(self, like: Node, values: Sequence[Any], dim: int, dtype: torch.dtype | None = None) -> Node:
        """Emit a constant with the device of ``like``.

        Args:
            like: A local node.
            values: Numbers, nested once for a matrix.
            dim: The dimension that ``values`` runs along, negative: ``dim=-2`` gives (len, 1) for a vector.
            dtype: The constant's dtype; that of ``like`` by default.

        Returns:
            A node of shape (len(values), 1, ...) for a vector, the matrix for nested values.
        """
        like_value = tensor_value(like)
        tensor = torch.tensor(values, dtype=dtype or like_value.dtype)
        if tensor.ndim == 1:
            tensor = tensor.reshape(-1, *(1,) * (-dim - 1))
        name = f"_fxshard_constant_{len(self.constants)}"
        self.constants[name] = tensor.to(like_value.device)
        node = self.graph.get_attr(name)
        self.adopt(node)
        node.meta["val"] = self.fake_mode.from_tensor(self.constants[name], static_shapes=True)
        return node

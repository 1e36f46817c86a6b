"""Splice: a call in a graph is replaced by the traced program that a rule expands it to.

Before::                          After::

    std = aten.std.dim(x, [2])    var_mean = aten.var_mean.correction(x, [2], ...)
                                  getitem = var_mean[0];  sqrt = aten.sqrt.default(getitem)

The program is traced below autograd on the call's global fake tensors; the nodes take the call's origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch import make_fx, unfunctionalized
from fxshard.emitter import ORIGIN_KEYS, RECOMPUTE_KEYS
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from fxshard.rules import Expand, OpCall


def splice(gm: fx.GraphModule, call: OpCall, choice: Expand) -> fx.Node | None:
    """Replace the call by its program; return the next node to plan, or None where the program is the call itself."""
    traced = _traced(call, choice.program)
    body = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    if choice.program is call.op and any(n.target is call.op for n in body):
        return None
    values: dict[fx.Node, fx.Node] = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), call.inputs, strict=True)
    )
    before = call.node.prev
    with gm.graph.inserting_before(call.node):
        for node in body:
            values[node] = _copy(gm, node, traced, values, call.node)
    results = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    _replace_uses(call.node, results, values)
    gm.graph.erase_node(call.node)
    return before.next


def _copy(
    gm: fx.GraphModule, node: fx.Node, traced: fx.GraphModule, values: dict[fx.Node, fx.Node], origin: fx.Node
) -> fx.Node:
    if node.op == "get_attr":  # a constant of the program moves to the graph under a free name
        name = f"_constant_{len(gm._buffers)}"
        gm.register_buffer(name, getattr(traced, str(node.target)), persistent=False)
        made = gm.graph.get_attr(name)
    else:
        made = gm.graph.node_copy(node, lambda n: values[n])
    made.meta = {k: v for k, v in origin.meta.items() if k in ORIGIN_KEYS + RECOMPUTE_KEYS}
    made.meta["val"] = node.meta.get("val")
    return made


def _replace_uses(node: fx.Node, results: Any, values: dict[fx.Node, fx.Node]) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(values[results])
        return
    for user in list(node.users):  # every user of several outputs is a getitem
        result = results[user.args[1]]
        user.replace_all_uses_with(values[result])
        user.graph.erase_node(user)


def _traced(call: OpCall, program: Any) -> fx.GraphModule:
    """Trace ``program`` on the call's global fake tensors into functional ATen operators."""
    fakes = [tensor_value(n) for n in call.inputs]

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = call.rebind(tensors)
        return program(*args, **kwargs)

    with torch.no_grad(), fakes[0].fake_mode:  # type: ignore[attr-defined]
        traced = make_fx(unfunctionalized(run), tracing_mode="real")(*fakes)
        if any(_writes(n) for n in traced.graph.nodes):  # a composite that was taken apart below functionalization
            traced = make_fx(unfunctionalized(traced), tracing_mode="real")(*fakes)
    traced.graph.eliminate_dead_code()
    return traced


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable

"""Splice: a call in a graph is replaced by the traced program that a rule expands it to.

Before::                          After::

    std = aten.std.dim(x, [2])    var_mean = aten.var_mean.correction(x, [2], ...)
                                  getitem = var_mean[0];  sqrt = aten.sqrt.default(getitem)

The program is traced below autograd on the call's global fake tensors; the nodes take the call's origin.  It has to
return what the call returned: as many outputs, each of the call's shape and dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard._torch import make_fx
from fxshard.emitter import ORIGIN_KEYS, RECOMPUTE_KEYS
from fxshard.errors import InternalError
from fxshard.ops.detached import DetachKept
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.rules import Expand, OpCall


def splice(gm: fx.GraphModule, call: OpCall, choice: Expand) -> fx.Node | None:
    """Replace the call by its program; return the next node to plan, or None where the program is the call itself.

    Raises:
        InternalError: The program returns something else than the call: a bug of the operator's rule.
    """
    traced = _traced(call, choice.program)
    body = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    if choice.program is call.op and any(n.target is call.op for n in body):
        return None
    values: dict[fx.Node, fx.Node] = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), call.inputs, strict=True)
    )
    results = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    _check(call, results)
    before = call.node.prev
    with gm.graph.inserting_before(call.node):
        for node in body:
            values[node] = _copy(gm, node, traced, values, call.node)
    _replace_uses(call.node, results, values)
    gm.graph.erase_node(call.node)
    return before.next


def _check(call: OpCall, results: Any) -> None:
    returned = list(results) if isinstance(results, (tuple, list)) else [results]
    found = [r.meta["val"] if isinstance(r, fx.Node) else r for r in returned]
    wanted = call.output_values
    used = {int(user.args[1]) for user in call.node.users} if len(wanted) > 1 else {0}  # type: ignore[arg-type]
    if len(found) == len(wanted) and all(_kind(found[i]) == _kind(wanted[i]) for i in used):
        return
    msg = (
        f"the program of {call.op} returns {_kinds(found)} in place of {_kinds(wanted)}, a bug of its rule in fxshard; "
        f"{call.node.format_node()}\n{call.node.meta.get('stack_trace', '').rstrip()}"
    )
    raise InternalError(msg)


def _kind(value: object) -> object:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _kinds(values: Sequence[object]) -> str:
    return ", ".join(f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else "none" for v in values)


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
        _stand_for(values[results], node, results)
        return
    for user in list(node.users):  # every user of several outputs is a getitem
        result = results[user.args[1]]
        _stand_for(values[result], user, result)
        user.graph.erase_node(user)


def _stand_for(made: fx.Node, gone: fx.Node, result: fx.Node) -> None:
    """Replace ``gone`` by ``made``, which is said to lie in memory as ``gone`` did: it may be read by strides."""
    if result.op != "placeholder":
        made.meta["val"] = gone.meta["val"]
    gone.replace_all_uses_with(made)


def _traced(call: OpCall, program: Any) -> fx.GraphModule:
    """Trace ``program`` on the call's global fake tensors into functional ATen operators."""
    fakes = [tensor_value(n) for n in call.inputs]

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = call.rebind(tensors)
        with DetachKept():
            return program(*args, **kwargs)

    with torch.no_grad(), fakes[0].fake_mode:  # type: ignore[attr-defined]
        traced = make_fx(torch.func.functionalize(run), tracing_mode="real")(*fakes)
        if any(_writes(n) for n in traced.graph.nodes):  # a composite that was taken apart below functionalization
            traced = make_fx(torch.func.functionalize(traced), tracing_mode="real")(*fakes)
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.fxshard.detached.default):
        node.target = torch.ops.aten.detach.default
    traced.graph.eliminate_dead_code()
    return traced


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable

"""Replaces every random operator by ``fxshard::random`` and arithmetic on what it drew, in graph order.

The captured graph has ATen's random operators; a backend would draw them in its own way and order.  After this
pass the draws are opaque, whole (global shape) and chained by their tokens, so any backend draws the bits that
eager mode draws::

    dropout(x, p)            mask, t = random("dropout_mask", p, after=t)      x * (mask / (1 - p))
    bernoulli(empty, p)      value, t = random("bernoulli", p, after=t)
    rand_like(x)             value, t = random("uniform", 0, 1, after=t)
    multinomial(w, n)        value, t = random("multinomial", n, given=w, after=t)

Nothing is sharded here: the planner sees replicated values and slices them where their consumers are split.
The arithmetic is ATen's own, in its order, so that float results agree bit for bit with eager mode.

Draws whose value nobody uses still advance the generator.  Earlier ones live through the token of a later one;
for the last, ``fxshard::keep_draws`` ties its token to an output.
"""

from __future__ import annotations

import itertools
import operator
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxshard._torch import detect_fake_mode
from fxshard.errors import PlanError
from fxshard.ops.random import ALIGNED_ELEMENTS, FUSED_DROPOUT_DEVICES
from fxshard.provenance import source_line
from fxshard.rules.call import OpCall
from fxshard.values import depends_on_data, is_tensor, tensor_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

aten = torch.ops.aten
RANDOM = torch.ops.fxshard.random.default
AFTER = 7  # the position of the token in RANDOM's arguments

# What describes the value of a node and not where it comes from.
VALUE_KEYS = frozenset({"val", "tensor_meta"})


@dataclass(frozen=True)
class Draw:
    """How one ATen operator is drawn.

    Args:
        name: The draw of ``fxshard::random``.
        params: Its numbers: constants, or names of the operator's arguments.
        into: The tensor argument that eager mode fills in place; None where it fills a new tensor.
        given: The names of the tensor arguments whose values are needed.
    """

    name: str
    params: tuple[str | float, ...] = ()
    into: str | None = None
    given: tuple[str, ...] = ()


# One row for each operator whose result is the draw itself.  The second group is functionalized in-place methods.
DRAWS: dict[torch._ops.OpOverload, Draw] = {
    aten.rand.default: Draw("uniform", (0.0, 1.0)),
    aten.rand_like.default: Draw("uniform", (0.0, 1.0)),
    aten.randn.default: Draw("normal", (0.0, 1.0)),
    aten.randn_like.default: Draw("normal", (0.0, 1.0)),
    aten.normal.float_float: Draw("normal", ("mean", "std")),
    aten.randint.default: Draw("random", (0, "high")),
    aten.randint.low: Draw("random", ("low", "high")),
    aten.randint_like.default: Draw("random", (0, "high")),
    aten.randint_like.low_dtype: Draw("random", ("low", "high")),
    aten.randperm.default: Draw("randperm", ("n",)),
    aten.bernoulli.p: Draw("bernoulli", ("p",), into="self"),
    aten.bernoulli.Tensor: Draw("bernoulli", (), into="self", given=("p",)),
    aten.uniform.default: Draw("uniform", ("from", "to"), into="self"),
    aten.normal_functional.default: Draw("normal", ("mean", "std"), into="self"),
    aten.exponential.default: Draw("exponential", ("lambd",), into="self"),
    aten.log_normal.default: Draw("log_normal", ("mean", "std"), into="self"),
    aten.geometric.default: Draw("geometric", ("p",), into="self"),
    aten.cauchy.default: Draw("cauchy", ("median", "sigma"), into="self"),
    aten.random.default: Draw("random", (), into="self"),
    aten.random.to: Draw("random", ("to",), into="self"),
    aten.bernoulli.default: Draw("bernoulli_of", given=("self",)),
    aten.binomial.default: Draw("binomial", given=("count", "prob")),
    aten.multinomial.default: Draw("multinomial", ("num_samples", "replacement"), given=("self",)),
    aten.normal.Tensor_Tensor: Draw("normal_around", given=("mean", "std")),
    aten.normal.Tensor_float: Draw("normal_around", ("std",), given=("mean",)),
    aten.normal.float_Tensor: Draw("normal_scaled", ("mean",), given=("std",)),
    aten.poisson.default: Draw("poisson", given=("self",)),
}


def replace_random(gm: GraphModule) -> GraphModule:
    """Replace the random operators of a captured graph by draws that match eager mode bit for bit.

    A second run changes nothing.

    Args:
        gm: A functional ATen graph with global shapes; every node has a fake ``meta["val"]``.

    Returns:
        The same graph module, its graph changed; the caller lints and recompiles.  New nodes have their own
        ``val`` and the source location of the node that they replace.

    Raises:
        PlanError: A node draws in a way that is not known, or from a generator of its own: a backend would draw it in
            its own way and order, and ranks might draw different numbers.
    """
    for node in list(gm.graph.nodes):
        call = OpCall(node) if draws(node) and not depends_on_data(node) else None
        if call is not None and call.arguments.get("generator") is None:
            results = _replacement(Site(call))
            if results is not None:
                substitute(node, results)
    left = next((node for node in _all_nodes(gm) if draws(node) and node.target is not RANDOM), None)
    if left is not None:
        raise PlanError(_refusal(left, nested=left.graph is not gm.graph))
    _chain_tokens(gm)
    _keep_last_draw(gm)
    return gm


def has_random(gm: GraphModule) -> bool:
    """Return whether running the graph advances a generator, before and after :func:`replace_random`.

    Args:
        gm: A captured graph; its nested graphs count too.
    """
    return any(draws(node) for node in _all_nodes(gm))


def is_known_draw(node: Node) -> bool:
    """Return whether :func:`replace_random` has a replacement for the node's operator."""
    return node.target is RANDOM or node.target in DRAWS or node.target in _SPECIAL


def _refusal(node: Node, *, nested: bool) -> str:
    op, where = str(node.target), source_line(node) or node.format_node()
    stack = node.meta.get("stack_trace", "").rstrip()
    if OpCall(node).arguments.get("generator") is not None:
        return f"{op} draws from a generator of its own at {where}; draw without generator=\n{stack}"
    if nested:
        return f"{op} draws in a branch or a loop at {where}, which runs as it is; draw before it\n{stack}"
    if depends_on_data(node):
        msg = f"{op} draws as many random numbers at {where} as only the data tells, in one order on every rank"
        return f"{msg}; draw for the whole tensor, then select\n{stack}"
    if "attention" in op:
        remedy = (
            "train with dropout_p=0, or use the attention that is made of operators, with "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the training loop"
        )
    else:
        remedy = "make it of draws that are known, such as torch.rand, torch.randn and torch.bernoulli"
    msg = f"{op} draws random numbers at {where} in a kernel of its own, of which ranks cannot have their parts"
    return f"{msg}; {remedy}\n{stack}"


def draws(node: Node) -> bool:
    """Return whether ``node`` advances a generator: it is tagged so, and neither in evaluation mode nor p = 0.

    Args:
        node: A node of a captured graph.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = OpCall(node).arguments
    if arguments.get("train", arguments.get("training")) is False:
        return False
    rate_name = "p" if "train" in arguments else "dropout_p"  # bernoulli's p draws even where it is 0
    return arguments.get("dropout", arguments.get(rate_name)) != 0


def _all_nodes(gm: GraphModule) -> Iterator[Node]:
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


@dataclass(frozen=True)
class Site:
    """Where a random node stands: new nodes go in front of it and take its source location.

    Args:
        call: The random node's call.
    """

    call: OpCall

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add ``target(*args, **kwargs)`` in front of the random node."""
        with self.call.node.graph.inserting_before(self.call.node):
            return _call(self.call.node.graph, self.call.node, target, args, kwargs)

    def draw(self, name: str, blank: torch.Tensor, params: Sequence[float], given: Sequence[Node] = ()) -> Node:
        """Add a draw into a tensor like ``blank`` and return the node of its value."""
        layout = [int(n) for n in blank.size()], [int(s) for s in blank.stride()]
        drawn = self.add(RANDOM, list(given), name, list(params), *layout, blank.dtype, blank.device, None)
        return self.add(operator.getitem, drawn, 0)


def _call(graph: torch.fx.Graph, origin: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta.update({k: v for k, v in origin.meta.items() if k not in VALUE_KEYS})
    values, keywords = map_arg((args, kwargs), lambda n: n.meta["val"])
    fake_mode = detect_fake_mode([origin.meta["val"]])
    assert fake_mode is not None, f"{origin.format_node()} has no fake value"
    with fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **keywords)
    return node


Results: TypeAlias = tuple[Node, ...]


def _replacement(site: Site) -> Results | None:
    """Return the nodes that stand for the outputs of the site's node, or None where it stays."""
    special = _SPECIAL.get(site.call.op)
    if special is not None:
        return special(site)
    draw = DRAWS.get(site.call.op)
    return None if draw is None else (_plain_draw(site, draw),)


def _plain_draw(site: Site, draw: Draw) -> Node:
    call = site.call
    result = tensor_value(call.node)
    params = [call[p] if isinstance(p, str) else p for p in draw.params]
    blank = result if draw.into is None or _is_out_of_place(call) else tensor_value(call[draw.into])
    value = site.draw(draw.name, blank, params, [call[name] for name in draw.given])
    if tensor_value(value).stride() != result.stride():  # functional bernoulli is contiguous whatever it filled
        value = site.add(aten.clone.default, value, memory_format=torch.contiguous_format)
    return value


def _is_out_of_place(call: OpCall) -> bool:
    # aten.bernoulli.p stands for torch.bernoulli(x, p), which fills a contiguous tensor, and for x.bernoulli_(p).
    name = str(call.node.meta.get("torch_fn", ("", ""))[1])
    return call.op is aten.bernoulli.p and name.endswith(".bernoulli")


def _dropout(site: Site) -> Results:
    """Return dropout's output as ``_dropout_impl`` and the fused kernel of ATen/native/Dropout.cpp compute it."""
    node, p = site.call["input"], site.call["p"]
    x = tensor_value(node)
    if p == 0 or x.numel() == 0:
        return (node,)
    if p == 1:
        return (site.add(aten.mul.Scalar, node, 0.0),)
    mask = site.draw("dropout_mask", x, (p, _misalignment(x)))
    if x.device.type in FUSED_DROPOUT_DEVICES:
        return (_scaled(site, node, mask, p),)
    noise = site.add(aten.div.Scalar, site.add(aten._to_copy.default, mask, dtype=x.dtype), 1 - p)
    return (site.add(aten.mul.Tensor, node, noise),)


def _native_dropout(site: Site) -> Results | None:
    node, p = site.call["input"], site.call["p"]
    x = tensor_value(node)
    if x.numel() == 0:
        return None
    mask = site.draw("native_dropout_mask", x, (p, _misalignment(x)))
    return _scaled(site, node, mask, p), mask


def _scaled(site: Site, node: Node, mask: Node, p: float) -> Node:
    return site.add(aten.mul.Scalar, site.add(aten.mul.Tensor, node, mask), _scale(p, tensor_value(node)))


def _scale(p: float, x: torch.Tensor) -> float:
    if p == 1:
        return 0.0
    if x.device.type not in FUSED_DROPOUT_DEVICES or x.dtype == torch.float64:
        return 1 / (1 - p)
    return _float32(1 / _float32(1 - p))  # the fused kernel divides in float32


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _misalignment(x: torch.Tensor) -> int:
    return int(x.storage_offset()) % ALIGNED_ELEMENTS


def _rrelu(site: Site) -> Results:
    """Return the output and the slopes, which are 1 where ``x`` is positive."""
    call = site.call
    x = call["self"]
    given = site.add(aten.detach.default, x)
    noise = site.draw("rrelu_noise", tensor_value(x), (call["lower"], call["upper"]), [given])
    return site.add(aten.mul.Tensor, x, noise), noise


_SPECIAL: dict[torch._ops.OpOverload, Callable[[Site], Results | None]] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.rrelu.default: lambda site: _rrelu(site)[:1],
    aten.rrelu_with_noise_functional.default: _rrelu,
}


def substitute(node: Node, results: Results) -> None:
    """Let ``results`` stand for the outputs of ``node``, and take it out of the graph."""
    if is_tensor(node):
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[cast("int", user.args[1])])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _chain_tokens(gm: GraphModule) -> None:
    drawn = [node for node in gm.graph.nodes if node.target is RANDOM]
    for before, node in itertools.pairwise(drawn):
        node.update_arg(AFTER, _token(before))


def _token(drawn: Node) -> Node:
    for user in drawn.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return user
    with drawn.graph.inserting_after(drawn):
        return _call(drawn.graph, drawn, operator.getitem, (drawn, 1), {})


def _keep_last_draw(gm: GraphModule) -> None:
    """Tie the last draw to the smallest output where no output depends on it."""
    drawn = [node for node in gm.graph.nodes if node.target is RANDOM]
    output = next(node for node in gm.graph.nodes if node.op == "output")
    if not drawn or drawn[-1] in _ancestors(output):
        return
    tensors = [n for n in output.all_input_nodes if is_tensor(n)]
    if not tensors:
        return
    # An input that is returned as it is stays the same tensor, if there is another output.
    value = min(tensors, key=lambda n: (n.op == "placeholder", tensor_value(n).numel()))
    token = _token(drawn[-1])
    with gm.graph.inserting_before(output):
        kept = _call(gm.graph, value, torch.ops.fxshard.keep_draws.default, (value, token), {})
    output.replace_input_with(value, kept)


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    pending = [node]
    while pending:
        new = [n for n in pending.pop().all_input_nodes if n not in found]
        found.update(new)
        pending.extend(new)
    return found

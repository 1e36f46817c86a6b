"""The time of each operator of a plan, and what the alternative would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.cost import compute_ns, share_of
from fxshard.node_costs import WHOLE
from fxshard.otherwise import Turns
from fxshard.report import Estimate
from fxshard.step_time import is_trained

if TYPE_CHECKING:
    from torch import fx

    from fxshard.cut_over import Choice
    from fxshard.devices import Device


def estimates(choice: Choice, device: Device) -> dict[str, Estimate]:
    """Return the time of each operator of a plan, and what the alternative would cost, by name.

    Args:
        choice: The plan.
        device: Of the table.

    Returns:
        Also of inputs and the output, where something is sent for them.
    """
    training, whole = is_trained(choice.graph), {name for name, _ in choice.config.whole}
    turns = Turns(choice.values, frozenset(choice.values) - {WHOLE} - whole)
    found = {}
    for node in choice.graph.graph.nodes:
        is_operator, waits = node.op == "call_function", choice.waits_ns[node.name]
        work = compute_ns(node, device, training=training) * share_of(node) if is_operator else 0
        if is_operator or waits:
            found[node.name] = _estimate(round(work) + waits, node, choice, turns)
    return found


def _estimate(here: int, node: fx.Node, choice: Choice, turns: Turns[str]) -> Estimate:
    value = choice.values.get(node.name)
    if value is None:
        return Estimate(here / 1e3)
    turn = turns.of(node.name)
    return Estimate(
        here_us=here / 1e3,
        is_split=node.name in turns.split,
        split_us=_us(value.split),
        whole_us=_us(value.whole),
        gather_us=_us(value.gather) if value.readers else None,
        otherwise_us=None if turn is None else turn.costs / 1e3,
        with_it=0 if turn is None else turn.with_it,
    )


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3

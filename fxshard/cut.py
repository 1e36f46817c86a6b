"""Which nodes of a graph run split and which whole: the exact optimum, as a minimum cut.

Each node has one of two labels.  A node costs what its label says; a value that one label makes and the other reads is
put together (or cut) once, however many read it so::

    cost = sum of split[v] over split nodes + sum of whole[v] over whole nodes
         + gather[v] for each split v that some whole node reads        (its value is gathered)
         + scatter[v] for each whole v that some split node reads       (its gradient is gathered)

In the flow network the nodes on the source's side are the split ones.  ``gather[v]`` is one arc to a node of its own,
from which arcs that are never cut lead to the readers: it is cut if v is split and any of them is whole (a hyperedge;
Ihler, Wagner and Wagner, 1993)::

    source --whole[v]--> v --split[v]--> sink          v --gather[v]--> (v) --inf--> readers
                                                       readers --inf--> [v] --scatter[v]--> v
                                                       v --inf--> what it needs

Costs are integers, so that the optimum is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

Name = TypeVar("Name", bound=Hashable)
SOURCE, SINK = "source", "sink"


@dataclass(frozen=True)
class Value:
    """A node and what it costs, in any unit that is small enough for integers: nanoseconds.

    Args:
        split: Its cost if it is split; None if it cannot be.
        whole: Its cost if it is whole; None if it has to be split.
        gather: What it costs if it is split and some reader is whole; None if no reader can be.
        scatter: What it costs if it is whole and some reader is split; None if no reader can be.
        readers: The nodes that read it.
        needs: The nodes that have to be split where this one is.
    """

    split: int | None
    whole: int | None
    gather: int | None = 0
    scatter: int | None = 0
    readers: tuple[Hashable, ...] = field(default=())
    needs: tuple[Hashable, ...] = field(default=())


def cost_of(values: Mapping[Name, Value], split: frozenset[Name]) -> int | None:
    """Return what a choice costs; None if it is not possible.

    Args:
        values: The nodes.
        split: Those that run split; the others run whole.
    """
    terms: list[int | None] = []
    for name, value in values.items():
        terms.append(value.split if name in split else value.whole)
        others = [reader for reader in value.readers if (reader in split) != (name in split)]
        if others:
            terms.append(value.gather if name in split else value.scatter)
        if name in split and not split.issuperset(value.needs):
            terms.append(None)
    known = [term for term in terms if term is not None]
    return sum(known) if len(known) == len(terms) else None


def cheapest_split(values: Mapping[Name, Value]) -> frozenset[Name]:
    """Return the nodes that run split where the cost is least.

    Args:
        values: The nodes; every reader is one of them.

    Raises:
        ValueError: No choice is possible.

    Example:
        >>> costs = {"conv": Value(5, 10, gather=1, readers=("head",)), "head": Value(4, 2)}
        >>> sorted(cheapest_split(costs))
        ['conv']
    """
    if not values:
        return frozenset()
    _, (split, _) = nx.minimum_cut(_network(values), SOURCE, SINK, flow_func=boykov_kolmogorov)
    found = frozenset(name for name in values if ("value", name) in split)
    if cost_of(values, found) is None:
        msg = "no choice of split and whole nodes is possible"
        raise ValueError(msg)
    return found


def _network(values: Mapping[Name, Value]) -> nx.DiGraph:
    """Return the flow network; an arc that is never cut has more capacity than all that may be."""
    never = 1 + sum(c for v in values.values() for c in (v.split, v.whole, v.gather, v.scatter) if c is not None)
    network = nx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    for name, value in values.items():
        own = ("value", name)
        _arc(network, SOURCE, own, value.whole, never)
        _arc(network, own, SINK, value.split, never)
        for needed in value.needs:
            _arc(network, own, ("value", needed), None, never)
        if value.readers:
            _hyperedges(network, own, value, never)
    return network


def _hyperedges(network: nx.DiGraph, own: tuple[str, Hashable], value: Value, never: int) -> None:
    gathered, scattered = ("gathered", own), ("scattered", own)
    _arc(network, own, gathered, value.gather, never)
    _arc(network, scattered, own, value.scatter, never)
    for reader in _once(value.readers):
        _arc(network, gathered, ("value", reader), None, never)
        _arc(network, ("value", reader), scattered, None, never)


def _once(readers: Sequence[Hashable]) -> list[Hashable]:
    return list(dict.fromkeys(readers))


def _arc(network: nx.DiGraph, tail: Hashable, head: Hashable, capacity: int | None, never: int) -> None:
    if capacity != 0:
        network.add_edge(tail, head, capacity=never if capacity is None else capacity)

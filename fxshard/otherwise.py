"""What it would cost to have one node of a plan the other way: whole in place of split, or split in place of whole.

A node does not turn alone where others need it (:class:`fxshard.cut.Value`): whole, it takes with it the split nodes
that need it split; split, it takes with it the whole nodes that it needs split.  The difference is that of
:func:`fxshard.cut.cost_of`, of which only the terms of the nodes that turn and of those that they read can change::

    cost(turned) - cost(chosen)  >=  0        the choice was the cheapest
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic

from fxshard.cut import Name, cost_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fxshard.cut import Value


@dataclass(frozen=True)
class Turn:
    """The other way to have a node.

    Args:
        costs: How much more than the choice, in the unit of the values.
        with_it: How many others turn with it.
    """

    costs: int
    with_it: int


@dataclass(frozen=True)
class Turns(Generic[Name]):
    """The other ways to have each node of a choice.

    Args:
        values: The nodes and their costs.
        split: Those that the choice splits.

    Example:
        >>> from fxshard.cut import Value
        >>> costs = {"conv": Value(5, 10, gather=1, readers=("head",)), "head": Value(4, 2)}
        >>> turns = Turns(costs, frozenset({"conv"}))
        >>> turns.of("conv"), turns.of("head")
        (Turn(costs=4, with_it=0), Turn(costs=1, with_it=0))
    """

    values: Mapping[Name, Value]
    split: frozenset[Name]

    def of(self, name: Name) -> Turn | None:
        """Return what it costs to turn a node; None where it, or one that turns with it, has no other way."""
        turned = self._turned(name)
        affected = {n: self.values[n] for n in turned.union(*(self._read_by[n] for n in turned))}
        before, after = cost_of(affected, self.split), cost_of(affected, self.split ^ turned)
        return None if before is None or after is None else Turn(after - before, len(turned) - 1)

    def _turned(self, name: Name) -> frozenset[Name]:
        found, pending = {name}, [name]
        while pending:
            node = pending.pop()
            tied = self._needed_by[node] & self.split if name in self.split else self._needs[node] - self.split
            pending += sorted(tied - found, key=str)
            found |= tied
        return frozenset(found)

    @cached_property
    def _needs(self) -> dict[Name, set[Name]]:
        return {name: set(value.needs) for name, value in self.values.items()}  # type: ignore[arg-type]  # nodes, all

    @cached_property
    def _needed_by(self) -> defaultdict[Name, set[Name]]:
        found: defaultdict[Name, set[Name]] = defaultdict(set)
        for name, needed in self._needs.items():
            for other in needed:
                found[other].add(name)
        return found

    @cached_property
    def _read_by(self) -> defaultdict[Name, set[Name]]:
        """For each node those that it reads."""
        found: defaultdict[Name, set[Name]] = defaultdict(set)
        for name, value in self.values.items():
            for reader in value.readers:
                found[reader].add(name)  # type: ignore[index]  # a reader is one of the nodes
        return found

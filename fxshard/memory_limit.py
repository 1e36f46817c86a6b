"""The quickest plan that keeps to a limit of memory, and where none does, the mesh that is needed for one.

What a rank needs falls with the number of ranks, so that is found by halves, along each mesh axis; on meshes of several
axes the shapes in between are planned for too, if they are few.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fxshard.errors import PlanError
from fxshard.memory import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fxshard.memory import Memory

log = logging.getLogger("fxshard")
GIB = 2**30
NEAR = 1.2
"""How many times the limit a plan may need that splits whatever can be, for others to be tried, too."""
MOST_SHAPES = 24
"""How many meshes are planned for, of those that have fewer ranks than one that is enough."""
SMALLER = "bfloat16, activation checkpoints and memory_budget need less, too"
Shape = tuple[int, ...]


class HasMemory(Protocol):
    """A plan, for what is asked here."""

    @property
    def memory(self) -> Memory:
        """Of a rank in the middle of the mesh."""


Found = TypeVar("Found", bound=HasMemory)


def check_limit(limit_gib: float | None) -> None:
    """Check a memory limit.

    Args:
        limit_gib: In GiB; None for none.

    Raises:
        PlanError: It is no size.
    """
    number = isinstance(limit_gib, (int, float)) and not isinstance(limit_gib, bool)
    if limit_gib is not None and not (number and limit_gib > 0):
        msg = f"memory_limit_gib={limit_gib!r} is no size in GiB; give a number above 0, or None for no limit"
        raise PlanError(msg)


@dataclass(frozen=True)
class Limit(Generic[Found]):
    """A limit, and what plans there are.

    Args:
        gib: What a rank's peak may be, in GiB.
        plans: Returns the plans on a mesh, the quickest first.
        split: Returns the one that splits whatever can be, which needs the least.
        most: How many ranks can have something of their own on each mesh axis.
    """

    gib: float
    plans: Callable[[Shape], Iterable[Found]]
    split: Callable[[Shape], Found]
    most: Shape

    def quickest(self, shape: Shape) -> Found:
        """Return the quickest plan on a mesh that keeps to the limit.

        Args:
            shape: Ranks on each mesh axis.

        Raises:
            PlanError: None does; with the mesh on which one does.
        """
        least = self.split(shape)
        tried = [least]
        if least.memory.peak.bytes <= NEAR * self.gib * GIB:
            for found in self.plans(shape):
                tried.append(found)
                if self._is_kept(found):
                    return found
            if self._is_kept(least):
                return least
        memory = min((plan.memory for plan in tried), key=lambda memory: memory.peak.bytes)
        fixed, ranks = memory.state_bytes + memory.gradient_bytes + memory.input_bytes, math.prod(shape)
        limit = size_text(round(self.gib * GIB))
        need = f"{ranks} ranks need {size_text(memory.peak.bytes)} each, and the limit is {limit}: "
        if fixed >= self.gib * GIB:
            whole = f"parameters, gradients and inputs are {size_text(fixed)} and whole on every rank"
            msg = f"{need}{whole}; no number of ranks is enough: use FSDP beside it"
            raise PlanError(msg)
        share = (memory.peak.bytes - fixed) / (self.gib * GIB - fixed)
        msg = f"{need}{self._remedy(shape, share)}; {SMALLER}"
        raise PlanError(msg)

    def _is_kept(self, plan: Found) -> bool:
        return plan.memory.peak.bytes <= self.gib * GIB

    def _fits(self, shape: Shape) -> bool:
        log.info("is %s ranks enough for %s?", " x ".join(map(str, shape)), size_text(round(self.gib * GIB)))
        return self._is_kept(self.split(shape))

    def _remedy(self, shape: Shape, share: float) -> str:
        """Return what mesh is needed.

        Args:
            shape: Of the mesh that is not enough.
            share: How many times more ranks would have parts that are small enough, were there nothing else.
        """
        along = [self._along(shape, axis, share) for axis in range(len(shape))]
        enough = min((found for found in along if found), key=math.prod, default=None)
        if enough is None:
            most = " x ".join(map(str, self.most))
            return f"more ranks, up to {most}, need more than that, too"
        between = list(itertools.islice(self._between(shape, enough), MOST_SHAPES + 1)) if len(shape) > 1 else []
        enough = next((s for s in between[:MOST_SHAPES] if self._fits(s)), enough)
        mesh = f"{math.prod(enough)} ranks" + f", a mesh of {' x '.join(map(str, enough))}," * (len(shape) > 1)
        if len(between) > MOST_SHAPES and enough not in between:
            return f"{mesh} are enough"
        return f"{mesh} are needed, and fewer are not enough"

    def _along(self, shape: Shape, axis: int, share: float) -> Shape | None:
        """Return the smallest mesh that is enough of those that have more ranks on one axis; None for none."""

        def mesh(ranks: int) -> Shape:
            return (*shape[:axis], ranks, *shape[axis + 1 :])

        too_few, most = shape[axis], self.most[axis]
        tried = min(max(too_few + 1, math.ceil(too_few * share)), most)
        while too_few < tried and not self._fits(mesh(tried)):
            too_few, tried = tried, min(2 * tried, most)
        if too_few >= tried:
            return None
        while tried - too_few > 1:
            middle = (too_few + tried) // 2
            (too_few, tried) = (too_few, middle) if self._fits(mesh(middle)) else (middle, tried)
        return mesh(tried)

    def _between(self, shape: Shape, enough: Shape) -> Iterator[Shape]:
        """Yield the meshes that contain one and have fewer ranks than another, those with the fewest first."""
        for ranks in range(math.prod(shape) + 1, math.prod(enough)):
            yield from (s for s in _factorised(ranks, shape) if all(n <= m for n, m in zip(s, self.most, strict=True)))


def _factorised(ranks: int, least: Sequence[int]) -> Iterator[Shape]:
    """Yield the meshes of so many ranks with at least as many on each axis.

    Example:
        >>> list(_factorised(12, (2, 2)))
        [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    first, *rest = least
    if not rest:
        yield from [(ranks,)] if ranks >= first else []
        return
    for here in range(first, ranks // math.prod(rest) + 1):
        if ranks % here == 0:
            yield from ((here, *others) for others in _factorised(ranks // here, rest))

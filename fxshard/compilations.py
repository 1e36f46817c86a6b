"""What is said of each compilation, to the logger ``"fxshard"``: of what, for which inputs, the how many-th, how long.

A plan is for one size.  A loader that has many sizes has as many compilations, and spends its time in them; so from
the fifth on it is a warning: training and evaluation, each with a smaller last batch, are four.  An image that is not
split over all axes of the mesh is a warning, too, and so are maps that are mostly whole on every rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fxshard._torch import graph_end
from fxshard.passes.capture import KEY, Captured
from fxshard.program import input_name
from fxshard.provenance import frame_line
from fxshard.values import LEAST_DIMENSIONS, described, is_tensor, plan_of, tensor_value

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config

log = logging.getLogger("fxshard")
SLOW = "compiling with Inductor, which takes minutes on CPUs; inner_backend='aot_eager' starts at once"
_said: set[str] = set()
"""What is said once in a process, and was."""
FEW = 4
"""Compilations of one model that are no news."""
MOST_WHOLE = 0.5
"""The part of the maps' elements that may be whole on every rank without news."""
CALL = "call_function"
REMEDY = "Each size is compiled once, as is each mode and each set of frozen parameters; pad images to a few sizes"


@dataclass(frozen=True)
class Compilation:
    """A graph that was compiled.

    Args:
        what: The model, or the piece of it.
        number: The how many-th of it; 0 where that is not known.
        planned: The global graph.
        seconds: How long it took, without Dynamo's own part.
    """

    what: str
    number: int
    planned: fx.GraphModule
    seconds: float

    def __str__(self) -> str:
        number = f"compilation {self.number}" if self.number else "compiled"
        text = f"{self.what}: {number}, for {_inputs(self.planned)}, in {self.seconds:.1f} s"
        text += f"; {self.not_shared}" if self.not_shared else ""
        return f"{text}. {REMEDY}" if self.number > FEW else text

    @cached_property
    def not_shared(self) -> str:
        """What ranks do not share, and why; nothing where the inputs and most of the maps are split as was asked."""
        if self.not_split:
            split = any(plan.sharded_axes for node in self.planned.graph.nodes if (plan := plan_of(node)) is not None)
            return f"{'ranks run the same work' if split else 'every rank runs all of it'}: {'; '.join(self.not_split)}"
        share, why = self._whole()
        if share <= MOST_WHOLE:
            return ""
        return f"{100 * share:.0f} % of the elements of its maps are whole on every rank, first because of {why}"

    @property
    def not_split(self) -> tuple[str, ...]:
        """Why the inputs are not split over all axes of the mesh, as was asked."""
        inputs = self.planned.graph.find_nodes(op="placeholder")
        return tuple(dict.fromkeys(plan.reason for n in inputs if (plan := plan_of(n)) is not None and plan.reason))

    @property
    def is_news(self) -> bool:
        """Whether this is worth a warning: there were many, or an image, or most of what it becomes, is not split."""
        inputs = [tensor_value(n) for n in _given(self.planned) if is_tensor(n)]
        return self.number > FEW or (bool(self.not_shared) and any(v.ndim >= LEAST_DIMENSIONS for v in inputs))

    def _whole(self) -> tuple[float, str]:
        """Return the part of the elements of all maps that every rank has, and the first reason of a gather."""
        plans = {n: plan for n in self.planned.graph.nodes if (plan := plan_of(n)) is not None and n.op == CALL}
        first = next((plan.reason for plan in plans.values() if plan.reason), "")
        maps = {n: plan for n, plan in plans.items() if is_tensor(n) and tensor_value(n).ndim >= LEAST_DIMENSIONS}
        sizes = {n: tensor_value(n).numel() for n in maps}
        whole = sum(sizes[n] for n, plan in maps.items() if not plan.sharded_axes)
        return (whole / max(sum(sizes.values()), 1), first) if first else (0.0, "")


def announce(compilation: Compilation, level: int) -> None:
    """Write a compilation to the log.

    Args:
        compilation: What was compiled.
        level: Of news (:func:`fxshard.mesh.news_level`); what is none is information.
    """
    log.log(level if compilation.is_news else logging.INFO, "%s", compilation)


def piece_name(gm: fx.GraphModule) -> str:
    """Return what a graph of a model is called: the line that it ends at.

    Args:
        gm: What Dynamo hands to a backend.
    """
    end = graph_end(gm)
    return "a graph" if end is None or not end.stack else f"the graph up to {frame_line(end.stack[-1])}"


def announce_compiler(config: Config, device: str, level: int) -> None:
    """Say, once, that what follows takes long: Inductor writes C++ for CPUs.

    Args:
        config: Names the inner backend.
        device: The type of the mesh's devices.
        level: Of news.
    """
    if config.inner_backend == "inductor" and device == "cpu" and SLOW not in _said:
        _said.add(SLOW)
        log.log(level, SLOW)


def _given(planned: fx.GraphModule) -> list[fx.Node]:
    captured: Captured = planned.meta[KEY]
    inputs = planned.graph.find_nodes(op="placeholder")
    return [node for node, is_state in zip(inputs, captured.is_state, strict=True) if not is_state]


def _inputs(planned: fx.GraphModule) -> str:
    return ", ".join(f"{input_name(n)} {described(n.meta.get('val'))}".strip() for n in _given(planned)) or "no inputs"

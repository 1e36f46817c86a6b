"""What is said of each compilation, to the logger ``"fxshard"``: of what, for which inputs, the how many-th, how long.

A plan is for one size.  A loader that has many sizes has as many compilations, and spends its time in them; so from
the fifth on it is a warning: training and evaluation, each with a smaller last batch, are four.  An image that is not
split over all axes of the mesh is a warning, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxshard._torch import graph_end
from fxshard.passes.capture import KEY, Captured
from fxshard.program import input_name
from fxshard.provenance import frame_line
from fxshard.values import LEAST_DIMENSIONS, described, is_tensor, plan_of, tensor_value

if TYPE_CHECKING:
    from torch import fx

log = logging.getLogger("fxshard")
FEW = 4
"""Compilations of one model that are no news."""
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
        same = "ranks run the same work" if self.is_split else "every rank runs all of it"
        text += f"; {same}: {'; '.join(self.not_split)}" if self.not_split else ""
        return f"{text}. {REMEDY}" if self.number > FEW else text

    @property
    def is_split(self) -> bool:
        """Whether ranks do different work anywhere."""
        return any(plan.sharded_axes for node in self.planned.graph.nodes if (plan := plan_of(node)) is not None)

    @property
    def not_split(self) -> tuple[str, ...]:
        """Why the inputs are not split over all axes of the mesh, as was asked."""
        inputs = self.planned.graph.find_nodes(op="placeholder")
        return tuple(dict.fromkeys(plan.reason for n in inputs if (plan := plan_of(n)) is not None and plan.reason))

    @property
    def is_news(self) -> bool:
        """Whether this is worth a warning: there were many, or an image is not split."""
        inputs = [tensor_value(n) for n in _given(self.planned) if is_tensor(n)]
        return self.number > FEW or (bool(self.not_split) and any(v.ndim >= LEAST_DIMENSIONS for v in inputs))


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


def _given(planned: fx.GraphModule) -> list[fx.Node]:
    captured: Captured = planned.meta[KEY]
    inputs = planned.graph.find_nodes(op="placeholder")
    return [node for node, is_state in zip(inputs, captured.is_state, strict=True) if not is_state]


def _inputs(planned: fx.GraphModule) -> str:
    return ", ".join(f"{input_name(n)} {described(n.meta.get('val'))}".strip() for n in _given(planned)) or "no inputs"

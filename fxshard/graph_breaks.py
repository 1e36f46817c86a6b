"""What a graph break costs, to the logger ``"fxshard"``: the user's line, the reason, and what is put together there.

Under ``torch.compile(backend="fxshard")`` Dynamo hands over a model in pieces where it meets code that it cannot
capture.  Each piece is exact, and takes and returns whole tensors::

    piece 1, split  --all_gather-->  whole  --the user's line-->  whole  --slice-->  piece 2, split
                    <----slice-----  gradient               <-----all_gather-------

Code that Dynamo cannot even go on behind, in a loop for one, leaves its whole function to Python, on every rank.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import fx

from fxshard.drawing import bytes_text
from fxshard.layout import Shard
from fxshard.passes.capture import KEY, Captured
from fxshard.provenance import frame_line, users_frame
from fxshard.report import describe
from fxshard.values import described, is_tensor, plan_of, tensor_value

if TYPE_CHECKING:
    from collections.abc import Sequence
    from traceback import FrameSummary

    from fxshard._torch import End
    from fxshard.passes.config import Config

log = logging.getLogger("fxshard")
BRANCH = "generic_jump"
"""How Dynamo's reason begins where a branch depends on a tensor."""
REMEDY = "Each piece is exact; to save this, change the line, or move it out of what is compiled"
_reported: set[tuple[str, int | None, str]] = set()
"""The breaks that were reported: file, line, reason."""


def report_cost(end: End, planned: fx.GraphModule, local: fx.GraphModule, config: Config, level: int) -> None:
    """Write to the log what the break at the end of a piece costs, once for each break.

    Args:
        end: Where the piece ends.
        planned: Its global graph.
        local: The rank's graph.
        config: The mesh and the rank.
        level: Of the message.
    """
    _report(end, _cost(planned, local, config) if _joined(planned) else "nothing is put together for it", level)


def report_empty(breaks: Sequence[End], level: int) -> None:
    """Write breaks to the log that no graph ends at, those that were reported before excepted.

    Args:
        breaks: Where Dynamo stopped, with nothing captured before.
        level: Of the message.
    """
    for end in breaks:
        ours = users_frame(end.stack) is not None  # DistributedDataParallel breaks on its own, before the model
        _report(end, "nothing was captured before it", level if ours else logging.INFO)


def reason_text(reason: str) -> str:
    r"""Return Dynamo's words for a reason, shortened.

    Example:
        >>> reason_text("Failed to trace builtin operator\n  Explanation: Dynamo does not know `print`\n  Hint: ...")
        'Failed to trace builtin operator: Dynamo does not know `print`'
        >>> reason_text("generic_jump TensorVariable()")
        'a branch on a value of a tensor'
    """
    if reason.startswith(BRANCH):
        return "a branch on a value of a tensor"
    head, *rest = reason.strip().splitlines() or [""]
    why = next((line.partition(":")[2] for line in rest if line.strip().startswith("Explanation:")), "")
    return f"{head}: {why.strip().rstrip('.')}" if why.strip() else head


def location(stack: Sequence[FrameSummary]) -> str:
    """Return the innermost line of a stack that is the user's, or else the innermost one."""
    frame = users_frame(stack) or (stack[-1] if stack else None)
    return "a line that is not known" if frame is None else frame_line(frame)


def _report(end: End, cost: str, level: int) -> None:
    frame = end.stack[-1] if end.stack else None
    key = (frame.filename if frame else "", frame.lineno if frame else None, end.reason)
    if key in _reported:
        return
    _reported.add(key)
    log.log(level, "graph break at %s: %s; %s. %s", location(end.stack), reason_text(end.reason), cost, REMEDY)


def _cost(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> str:
    """Return which values are put together at the end of a piece, and the bytes."""
    joined = _joined(planned)
    sent = describe(planned, local, config).nodes[-1].sent.of("gather").bytes
    captured: Captured = planned.meta[KEY]
    values = ", ".join(described(tensor_value(node)) for node in joined)
    back = ", and as many backward where the next piece splits it again" if captured.is_trained else ""
    count = f"{len(joined)} split value{'s are' if len(joined) > 1 else ' is'}"
    return f"{count} put together on every rank: {values}; a rank sends {bytes_text(sent)} in each forward{back}"


def _joined(planned: fx.GraphModule) -> list[fx.Node]:
    """Return the outputs that are split before they are returned; a sum's terms are added with a break and without."""
    captured: Captured = planned.meta[KEY]
    returned = planned.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    values = dict.fromkeys(v for v in returned[len(captured.updates) :] if isinstance(v, fx.Node) and is_tensor(v))
    plans = [(value, plan.outputs[0]) for value in values if (plan := plan_of(value)) is not None]
    return [value for value, layout in plans if any(isinstance(placement, Shard) for placement in layout)]

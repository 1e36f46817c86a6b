"""What a compilation leaves in the trace of ``TORCH_TRACE``, for ``tlparse``: the plan and the rank's program.

::

    TORCH_TRACE=traces torchrun --nproc-per-node 4 train.py
    tlparse traces/dedicated_log_torch_trace_rank_0_*.log

Each compiled graph has three artifacts beside torch's own::

    fxshard_plan_summary     the page of ``fxshard plan``
    fxshard_plan             the plan as JSON, docs/plan.schema.json
    fxshard_local_graph      the rank's program, under comments that say what its inputs are
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING

from fxshard._torch import trace_artifact
from fxshard.plan_text import summary
from fxshard.program import program
from fxshard.report import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from fxshard.passes.config import Config
    from fxshard.report import PlanReport

log = logging.getLogger("fxshard")


def leave(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> None:
    """Write the artifacts of one compilation, and its summary to the log at ``DEBUG``.

    Args:
        planned: The global graph with a layout on every node.
        local: That of ``config.rank``.
        config: What was asked, and decided.
    """

    @cache
    def report() -> PlanReport:
        return describe(planned, local, config)

    @cache
    def page() -> str:
        return "\n".join(summary(report()))

    if log.isEnabledFor(logging.DEBUG):
        _leave("the plan's summary", lambda: log.debug("%s", page()))
    for name, encoding, write in (
        ("fxshard_plan_summary", "string", page),
        ("fxshard_plan", "json", lambda: report().to_json()),
        ("fxshard_local_graph", "string", lambda: program(planned, local, config)),
    ):
        _leave(f"the artifact {name} of torch's trace", partial(trace_artifact, name, encoding, write))


def _leave(what: str, write: Callable[[], None]) -> None:
    """Write something for the reader; that it cannot be is said in the log, and no reason not to train."""
    try:
        write()
    except Exception:
        log.warning("%s could not be written", what, exc_info=True)

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
from typing import TYPE_CHECKING

from fxshard._torch import trace_artifact
from fxshard.plan_text import summary
from fxshard.program import program
from fxshard.report import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from fxshard.passes.config import Config

log = logging.getLogger("fxshard")


def leave(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> None:
    """Write the artifacts of one compilation, and its summary to the log at ``DEBUG``.

    Args:
        planned: The global graph with a layout on every node.
        local: That of ``config.rank``.
        config: What was asked, and decided.
    """

    def page() -> str:
        return "\n".join(summary(describe(planned, local, config)))

    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", page())
    _leave("fxshard_plan_summary", "string", page)
    _leave("fxshard_plan", "json", lambda: describe(planned, local, config).to_json())
    _leave("fxshard_local_graph", "string", lambda: program(planned, local, config))


def _leave(name: str, encoding: str, write: Callable[[], str]) -> None:
    """Write one artifact; what a trace lacks is said in the log, and no reason not to train."""
    try:
        trace_artifact(name, encoding, write)
    except Exception:
        log.warning("the artifact %s could not be written to torch's trace", name, exc_info=True)

"""Several pools of ranks at a time, each fed one model after the other.

::

    models --> queue --> thread 1: RankPool (2 to 4 processes) --> verdicts, one at a time --> file
                         thread 2: RankPool                    -/
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from fxshard.workers import RankPool, WorkerError
from tools.zoo.check import Finding, check
from tools.zoo.models import fitting_size
from tools.zoo.survey import survey
from tools.zoo.verdict import Setting, State, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONGEST_NOTE = 600


@dataclass(frozen=True)
class Plan:
    """What is done with each model.

    Args:
        setting: The mesh and the image's size.
        checked: Whether to compare it with itself on ranks.
        surveyed: Whether to plan it at a realistic size.
        timeout_s: For each of the two, in seconds.
    """

    setting: Setting
    checked: bool = True
    surveyed: bool = True
    timeout_s: float = 240


def run_all(models: Sequence[str], plan: Plan, *, jobs: int) -> Iterator[Verdict]:
    """Yield the verdict of each model as soon as it is there.

    Args:
        models: Their names.
        plan: What is done with each.
        jobs: How many pools work at a time.
    """
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as threads:
        pools: SimpleQueue[RankPool] = SimpleQueue()
        for _ in range(min(jobs, len(models))):
            pools.put(stack.enter_context(_pool(plan)))

        def run_next(name: str) -> Verdict:
            pool = pools.get()
            try:
                return run_one(pool, name, plan)
            finally:
                pools.put(pool)

        for done in as_completed([threads.submit(run_next, name) for name in models]):
            yield done.result()


def _pool(plan: Plan) -> RankPool:
    mesh = plan.setting.mesh if plan.checked else (1,)
    return RankPool(math.prod(mesh), meshes=[mesh])


def run_one(pool: RankPool, name: str, plan: Plan) -> Verdict:
    """Return the verdict of one model.

    Args:
        pool: Its ranks.
        name: The model.
        plan: What is done with it.
    """
    start = time.perf_counter()
    setting = plan.setting
    verdict = Verdict(name, setting, setting.size, "planned")
    try:
        if plan.checked:
            verdict = _checked(verdict, check(pool, name, setting, timeout_s=plan.timeout_s))
        if plan.surveyed:
            (found,) = pool.run(survey, name, setting, ranks=1, timeout_s=plan.timeout_s)
            verdict = replace(verdict, survey=found)
        verdict = replace(verdict, size=fitting_size(name, setting.size))
    except WorkerError as failure:
        verdict = _failed(verdict, failure)
    return replace(verdict, seconds=round(time.perf_counter() - start, 1))


def _checked(verdict: Verdict, finding: Finding) -> Verdict:
    state: State = "exact" if finding.exact else "own rounding" if finding.excused else "differs"
    return replace(verdict, state=state, error=finding.error, own_error=finding.own_error, note=finding.text)


def _failed(verdict: Verdict, failure: WorkerError) -> Verdict:
    cause = next(iter(failure.causes.values()), None)
    if cause is not None and cause.type_name == "NotInstalledError":
        return replace(verdict, state="not installed", note=cause.message)
    note = f"{cause.type_name}: {cause.message}" if cause else str(failure)
    return replace(verdict, state="fails", error=math.inf, note=_shortened(note))


def _shortened(text: str) -> str:
    """Return the beginning, which says what is wrong, and the end, which says where."""
    half = LONGEST_NOTE // 2
    return text if len(text) <= LONGEST_NOTE else f"{text[:half]} ... {text[-half:]}"

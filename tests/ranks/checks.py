"""Runs cases on ranks and says, for each, how far it is from the untouched model and what was gathered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fxshard import backend
from fxshard.compare import Case, compare_on_rank
from fxshard.values import plan_of
from fxshard.workers import mesh

if TYPE_CHECKING:
    from torch import fx

    from fxshard.workers import RankPool


@dataclass(frozen=True)
class Verdict:
    """What one rank says of one case.

    Args:
        exact: Whether everything equals the untouched model.
        text: The table of differences.
        reasons: Why something was gathered, without repetition, in program order.
        targets: The targets of the local graph's nodes.
        split: Whether some work is split: a model that every rank runs whole is equal without saying anything.
    """

    exact: bool
    text: str
    reasons: tuple[str, ...]
    targets: tuple[str, ...]
    split: bool


def judge(rank: int, cases: list[Case]) -> list[Verdict]:
    """Compare every case on this rank, on the ranks' device (runs in a rank process)."""
    return [_judge_one(rank, replace(case, device=mesh(case.mesh_shape).device_type)) for case in cases]


def _judge_one(rank: int, case: Case) -> Verdict:
    reasons: dict[str, None] = {}
    targets: list[str] = []
    split: list[bool] = []

    def observe(planned: fx.GraphModule, local: fx.GraphModule, _config: Any) -> None:
        plans = [(node, p) for node in planned.graph.nodes if (p := plan_of(node))]
        reasons.update(dict.fromkeys(p.reason for _, p in plans if p.reason))
        split.extend(bool(p.sharded_axes) for node, p in plans if node.op == "call_function")
        targets.extend(str(n.target) for n in local.graph.nodes)

    backend.on_compiled.append(observe)
    try:
        difference = compare_on_rank(rank, case)
    finally:
        backend.on_compiled.remove(observe)
    return Verdict(difference.exact(), str(difference), tuple(reasons), tuple(targets), any(split))


def assert_exact(pool: RankPool, case: Case, *, gathers: bool | None = False) -> Verdict:
    """Assert that ``case`` is exact on every rank, that its work is split, and whether something was gathered.

    Args:
        pool: The ranks.
        case: What to run.
        gathers: Whether a gather is expected; None for either.  Only where it is may every rank run the whole model.

    Returns:
        The verdict of rank 0.
    """
    ranks = 1
    for size in case.mesh_shape:
        ranks *= size
    verdicts = [v[0] for v in pool.run(judge, [case], ranks=ranks)]
    for rank, verdict in enumerate(verdicts):
        assert verdict.exact, f"rank {rank}:\n{verdict.text}\ngathers: {verdict.reasons}"
        if gathers is not None:
            assert bool(verdict.reasons) == gathers, f"gathers: {verdict.reasons}"
        assert gathers or verdict.split or ranks == 1, f"every rank ran the whole model: {verdict.reasons}"
    return verdicts[0]

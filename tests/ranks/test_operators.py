"""Operators drawn at random on split images equal one device: ``tools/sweep_operators.py`` runs more of the same.

The seed is fixed, so that a change is judged by the same configurations as the one before; ``--operator-seed`` draws
others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from fxshard.rules import Row, Rule, registered
from tests.operators.configuration import FAMILIES, Drawn, draw
from tests.operators.family import Op
from tests.operators.packs import Finding, judge, packs, run_pack, smallest

if TYPE_CHECKING:
    from fxshard.workers import RankPool

COUNT = 200
LEAST_SPLIT = 0.75
"""Of the configurations on several ranks, how many gather nothing: where all is gathered, nothing is shown."""
MENDED = (
    Drawn(
        (3, 1, 33, 2),
        (Op("interpolate", mode="bilinear", antialias=True, scale_factor=(0.4, 0.5), recompute_scale_factor=True),),
        mesh=(3,),
        dims=(2,),
    ),
    Drawn((1, 1, 3, 6), (Op("interpolate", mode="nearest", scale_factor=0.4),), mesh=(2,), dims=(3,)),
)
"""What differed once."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def seed(request: pytest.FixtureRequest) -> int:
    found: int = request.config.getoption("--operator-seed")
    return found


@pytest.fixture(scope="module")
def findings(pool: RankPool, seed: int) -> list[Finding]:
    drawn = [*MENDED, *(draw(seed, index) for index in range(COUNT))]
    return [finding for pack in packs(drawn) for finding in run_pack(pool, pack)]


def test_drawn_operators_equal_one_device(pool: RankPool, seed: int, findings: list[Finding]) -> None:
    failed = [finding for finding in findings if not finding.exact]
    texts = [f"{f.drawn}\n{f.text}\nsmallest found: {smallest(pool, f).drawn}" for f in failed[:3]]
    assert not failed, f"seed {seed}: {len(failed)} of {len(findings)} differ\n" + "\n\n".join(texts)


def test_most_drawn_operators_run_split(seed: int, findings: list[Finding]) -> None:
    kinds = Counter(finding.kind for finding in findings)
    reasons = Counter(reason for finding in findings for reason in finding.reasons)
    several = len(findings) - kinds["one rank"]
    assert kinds["split"] >= LEAST_SPLIT * several, f"seed {seed}: {kinds}, gathered because {reasons.most_common(9)}"


def test_every_family_is_drawn(findings: list[Finding]) -> None:
    drawn = {name for finding in findings for name in finding.drawn.families}
    assert drawn >= FAMILIES.keys() - {"pointwise"}


def test_a_configuration_is_made_again_from_its_text(seed: int) -> None:
    drawn = draw(seed, 0)
    assert eval(repr(drawn), {"Drawn": Drawn, "Op": Op}) == drawn == draw(seed, 0) != draw(seed, 1)


def judge_with_a_wrong_rule(rank: int, pack: tuple[Drawn, ...]) -> list[Finding]:
    """Compare with a rule that sums up each rank's part alone (runs in a rank process)."""
    op = torch.ops.aten.cumsum.default
    right = registered()[op]
    registered()[op] = Rule(lambda _call, at: Row(at, at))
    try:
        return judge(rank, pack)
    finally:
        registered()[op] = right


def test_a_wrong_rule_is_found(pool: RankPool) -> None:
    roll = Drawn((1, 2, 9), (Op("roll", shifts=(2,), dims=(2,)),), mesh=(2,), dims=(2,))
    scan = Drawn((1, 2, 9), (Op("scan", kind="cumsum", dim=2),), mesh=(2,), dims=(2,))
    first, second = pool.run(judge_with_a_wrong_rule, (roll, scan), ranks=2)[0]
    assert first.exact
    assert not second.exact
    assert "output[1][0]" in second.text

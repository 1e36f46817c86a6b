"""Runs drawn configurations on ranks, several in one model: what costs is the capture, not the work.

    configurations  ->  packs of one split each  ->  one model, one transform, one step  ->  a finding for each

Each configuration of a pack has an input, operators and outputs of its own, and is judged by those.  A pack that
raises is run again one by one.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from fxshard import backend, transform
from fxshard.compare import Case, Trace, difference
from fxshard.passes.capture import KEY
from fxshard.trace import Step, build_model, run_steps
from fxshard.values import plan_of
from fxshard.workers import RankPool, WorkerError, mesh
from tests.operators.configuration import Chain, Drawn, is_valid, smaller

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PACK_SIZE = 12
MOST_TRIALS = 40
"""How many smaller configurations are tried for each failure."""


@dataclass(frozen=True)
class Finding:
    """What is found of one configuration.

    Args:
        drawn: The configuration.
        exact: Whether all ranks equal one device.
        text: What differs or was raised.
        split: How many operators run split.
        operators: How many there are.
        reasons: Why something is gathered.
    """

    drawn: Drawn
    exact: bool
    text: str
    split: int = 0
    operators: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """How it ran: on one rank, wholly split, partly split, or gathered."""
        if prod(self.drawn.mesh) == 1:
            return "one rank"
        if self.reasons or not self.split:
            return "partly" if self.split else "gathered"
        return "split"


class Pack(nn.Module):
    """The chains of several configurations side by side."""

    def __init__(self, pack: Sequence[Drawn]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(Chain(drawn) for drawn in pack)

    def forward(self, *images: Tensor) -> list[list[Tensor]]:
        return [chain(x) for chain, x in zip(self.chains, images, strict=True)]


def packs(drawn: Iterable[Drawn], size: int = PACK_SIZE) -> Iterator[tuple[Drawn, ...]]:
    """Yield the configurations by split and number of dimensions, at most ``size`` together."""
    waiting: dict[Any, list[Drawn]] = defaultdict(list)
    for one in drawn:
        alike = waiting[one.mesh, one.dims, len(one.shape)]
        alike.append(one)
        if len(alike) == size:
            yield tuple(alike)
            alike.clear()
    yield from (tuple(alike) for alike in waiting.values() if alike)


def run_pack(pool: RankPool, pack: Sequence[Drawn]) -> list[Finding]:
    """Return a finding for each configuration of a pack.

    Args:
        pool: Ranks with all of :data:`tests.operators.configuration.MESHES`.
        pack: Configurations of one split.
    """
    try:
        by_rank = pool.run(judge, tuple(pack), ranks=prod(pack[0].mesh))
    except WorkerError as error:
        if len(pack) == 1:
            return [Finding(pack[0], exact=False, text=_summary(error))]
        alone = [finding for drawn in pack for finding in run_pack(pool, (drawn,))]
        together = f"raised only in one model with {pack}: {_summary(error)}"
        return alone if any(not f.exact for f in alone) else [Finding(pack[0], exact=False, text=together), *alone[1:]]
    return [next((f for f in findings if not f.exact), findings[0]) for findings in zip(*by_rank, strict=True)]


def smallest(pool: RankPool, finding: Finding) -> Finding:
    """Return the finding of a smaller configuration that fails too, or ``finding``."""
    trials = 0
    while True:
        for drawn in smaller(finding.drawn):
            if trials == MOST_TRIALS or not is_valid(drawn):
                continue
            trials += 1
            found = run_pack(pool, (drawn,))[0]
            if not found.exact:
                finding = found
                break
        else:
            return finding


def judge(rank: int, pack: tuple[Drawn, ...]) -> list[Finding]:
    """Compare each configuration of a pack with one device (runs in a rank process)."""
    del rank
    warnings.simplefilter("ignore")  # torch's own, about the options drawn
    torch.compiler.reset()
    shards = [Shard(dim) for dim in pack[0].dims]
    case = Case(functools.partial(_build, pack), tuple(shards), pack[0].mesh, steps=1)
    reference = run_steps(*build_model(case), case)
    model, inputs = build_model(case)
    graphs: list[fx.GraphModule] = []
    backend.on_compiled.append(lambda planned, *_: graphs.append(planned))
    try:
        net = transform(model, mesh=mesh(case.mesh_shape), placements=shards, inner_backend="eager")
        found = run_steps(net, inputs, case)
    finally:
        backend.on_compiled.pop()
    work = _work(graphs[0], len(pack)) if graphs else [(0, 0, ())] * len(pack)
    return [_judge_one(drawn, _part(reference, at), _part(found, at), work[at]) for at, drawn in enumerate(pack)]


def _build(pack: tuple[Drawn, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Pack(pack), tuple(drawn.image() for drawn in pack)


def _judge_one(drawn: Drawn, reference: Trace, found: Trace, work: tuple[int, int, tuple[str, ...]]) -> Finding:
    distance = difference(reference, found)
    return Finding(drawn, distance.exact(), "" if distance.exact() else str(distance), *work)


def _part(trace: Trace, at: int) -> Trace:
    """Return the trace of one configuration."""
    prefixes = (f"input[{at}]", f"output[{at}]", f"chains.{at}.")
    (step,) = trace.steps
    parts = {
        name: {key: value for key, value in table.items() if key.startswith(prefixes)}
        for name, table in vars(step).items()
        if name != "generators"
    }
    return Trace((Step(**parts, generators=step.generators),))


def _work(planned: fx.GraphModule, count: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return, for each configuration, how many operators run split, how many there are, and why some are gathered."""
    placeholders = [n for n in planned.graph.nodes if n.op == "placeholder"]
    images = [n for n, state in zip(placeholders, planned.meta[KEY].is_state, strict=True) if not state]
    assert len(images) == count, "each configuration has one input, in order"
    owner = {node: at for at, node in enumerate(images)}
    split, total, reasons = [0] * count, [0] * count, [dict[str, None]() for _ in range(count)]
    for node in planned.graph.nodes:
        owners = [owner[n] for n in node.all_input_nodes if n in owner]
        plan = plan_of(node)
        if node.op != "call_function" or not owners or plan is None:
            continue
        at = owner[node] = owners[0]
        split[at] += bool(plan.sharded_axes)
        total[at] += 1
        reasons[at] |= dict.fromkeys([plan.reason] if plan.reason else [])
    return [(split[at], total[at], tuple(reasons[at])) for at in range(count)]


def _summary(error: WorkerError) -> str:
    causes = [f"{cause.type_name}: {cause.message}" for cause in error.causes.values()]
    return "\n".join(dict.fromkeys(causes)) if causes else str(error)

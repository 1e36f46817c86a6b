"""Autocast over ranks: as precise as untouched autocast, 16-bit halos, float32 statistics and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.compare import VANISHING_SCALE, Case, Trace, difference, run_steps
from fxshard.trace import build_model
from fxshard.workers import mesh

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from fxshard.workers import RankPool

RANKS = 2
STATE = ("running_mean", "running_var")


class Amp(nn.Module):
    """The case autocast-bf16-bn, with or without its own region."""

    def __init__(self, *, inner: bool) -> None:
        super().__init__()
        self.inner = inner
        self.c, self.n, self.d = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3, 1, 1)
        self.g = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inner or torch.is_autocast_enabled("cpu")):
            return self.g(self.d(F.relu(self.n(self.c(x)))))


class Mixed(nn.Module):
    """A part in float32 between two parts in bfloat16, and a product of the whole image."""

    def __init__(self, *, inner: bool) -> None:
        super().__init__()
        self.inner = inner
        self.first, self.wide, self.last = (nn.Conv2d(a, 4, 3, padding=1) for a in (3, 4, 4))
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inner or torch.is_autocast_enabled("cpu")):
            y = F.max_pool2d(F.gelu(self.first(x)), 2)
            with torch.autocast("cpu", enabled=False):
                y = self.norm(self.wide(y.to(x.dtype)))
            y = self.last(y) + y
            return y, self.head(y.mean((2, 3)))


class Ambient(nn.Module):
    """Calls a model within an autocast region that its graph does not see."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x)


def build(kind: type[Amp | Mixed], inner: bool) -> tuple[nn.Module, tuple[Tensor]]:
    model = kind(inner=inner)
    return model if inner else Ambient(model), (torch.randn(2, 3, 16, 24) + 2,)


@dataclass
class Seen:
    """What a rank saw: whether it is as precise as one device, and how."""

    within: bool
    report: str
    halos: list[tuple[torch.dtype, int]]
    gradients: set[torch.dtype]
    statistics: set[torch.dtype]


def train(rank: int, case: Case) -> Seen:
    """Train the untouched model in float64 (which autocast leaves alone) and in float32, and the sharded one."""
    from fxshard import backend

    halos: list[tuple[torch.dtype, int]] = []

    def observe(_graph: GraphModule, local: GraphModule, _config: Any) -> None:
        exchanges = local.graph.find_nodes(op="call_function", target=torch.ops.fxshard.halo_exchange.default)
        halos.extend((n.meta["val"].dtype, n.args[1]) for n in exchanges)

    torch.compiler.reset()
    backend.on_compiled.append(observe)
    try:
        truth = run_steps(*build_model(replace(case, dtype=torch.float64)), replace(case, dtype=torch.float64))
        single = run_steps(*build_model(case), case)
        model, inputs = build_model(case)
        sharded = run_steps(shard(model, case), inputs, case)
    finally:
        backend.on_compiled.remove(observe)
    last = sharded.steps[-1]
    return Seen(
        *judged(truth, single, sharded),
        halos,
        {g.dtype for g in last.parameter_gradients.values() if g is not None},
        {b.dtype for name, b in last.buffers.items() if b is not None and name.endswith(STATE)},
    )


def judged(truth: Trace, single: Trace, sharded: Trace) -> tuple[bool, str]:
    """Return whether the sharded model's error is at most twice the untouched model's own, and a report.

    A gradient whose true value is zero is noise in both: it is to be below the rounding of the largest gradient.
    """
    between = difference(single, sharded)
    own, found = (difference(truth, trace, dtypes=False) for trace in (single, sharded))
    within = all(found.worst[kind].error <= 2 * own.worst[kind].error for kind in found.worst if kind != "vanishing")
    noise = found.worst["vanishing"].error * VANISHING_SCALE
    report = f"{between}\nuntouched against float64\n{own}\nsharded against float64\n{found}"
    return within and noise <= torch.finfo(torch.bfloat16).eps and not between.mismatches, report


def shard(model: nn.Module, case: Case) -> nn.Module:
    from fxshard.api import transform

    options = {"mesh": mesh(case.mesh_shape), "placements": case.placements, "inner_backend": case.inner_backend}
    if not isinstance(model, Ambient):
        return transform(model, **options)  # type: ignore[arg-type]
    model.net = transform(model.net, **options)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("dim", "inner_backend"),
    [
        pytest.param(2, "eager", id="H-eager"),
        pytest.param(3, "aot_eager", id="W-aot_eager"),
        pytest.param(2, "aot_eager", id="H-aot_eager", marks=pytest.mark.nightly),
        pytest.param(3, "eager", id="W-eager", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("inner", [False, True], ids=["ambient", "inner"])
@pytest.mark.parametrize("kind", [Amp, Mixed], ids=["autocast-bf16-bn", "mixed"])
def test_sharded_autocast(
    pool: RankPool, kind: type[Amp | Mixed], *, inner: bool, dim: int, inner_backend: str
) -> None:
    case = Case(
        partial(build, kind, inner),
        placements=(Shard(dim),),
        mesh_shape=(RANKS,),
        inner_backend=inner_backend,
        dtype=torch.float32,
    )
    for seen in cast("list[Seen]", pool.run(train, case, ranks=RANKS)):
        assert seen.within, seen.report
        expected = [torch.bfloat16] * 2 if kind is Amp else [torch.bfloat16, torch.float32, torch.bfloat16]
        assert seen.halos == [(dtype, dim) for dtype in expected]
        assert seen.gradients == {torch.float32}
        assert seen.statistics == ({torch.float32} if kind is Amp else set())

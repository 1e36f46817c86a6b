"""Times and memory of a training step: on one device in some ways, and split over ranks.

Every row trains the same model, weights and images, with the same draws, for some steps::

    eager, compiled, checkpointed      one device, the image of --input
    strong                             n ranks share the image of --input
    weak                               n ranks share an image n times as large: each has as much as one device had
    DTensor                            torch's own: the image sharded, parameters replicated, operator by operator

A row that a library cannot do, or that needs too much memory, says why.  One that fxshard cannot do is an error.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from fxshard._torch import dead_draws_kept
from fxshard.api import transform
from fxshard.models import build_named
from fxshard.rank_process import mesh
from fxshard.workers import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from fxshard.model_inputs import ModelInput
    from fxshard.workers import RankPool

WARM_UP = 3
"""Steps before the timed ones; the first compiles."""
DTYPES = ("fp32", "bf16")
"""Of the step: bf16 is autocast."""
OUT_OF_MEMORY = torch.OutOfMemoryError.__name__
MOST_WORDS = 120
"""Letters of a library's error in a table."""


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        model: A name that :func:`fxshard.models.build_named` knows.
        inputs: One for each argument of its forward; the first is the image.
        mesh_shape: Ranks on each mesh axis.
        dims: The dimension that each mesh axis splits.
        dtype: One of :data:`DTYPES`.
        inner_backend: What compiles.
        steps: How many are timed.
        device: ``"cpu"`` or ``"cuda"``.
        options: Of :func:`fxshard.transform`.
    """

    model: str
    inputs: tuple[ModelInput, ...]
    mesh_shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: str = DTYPES[0]
    inner_backend: str = "inductor"
    steps: int = 10
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many share an image."""
        return math.prod(self.mesh_shape)

    def enlarged(self) -> Work:
        """Return the work on an image that is larger by the ranks of each axis, along what the axis splits."""
        sizes = list(self.inputs[0].sizes)
        for ranks, dim in zip(self.mesh_shape, self.dims, strict=True):
            sizes[dim] *= ranks
        return self.sized(sizes)

    def sized(self, sizes: Sequence[int]) -> Work:
        """Return the work on images of other sizes."""
        image, *others = self.inputs
        return replace(self, inputs=(replace(image, sizes=tuple(sizes)), *others))

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs."""
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()


@dataclass(frozen=True)
class Measured:
    """What a rank measured.

    Args:
        ms: Of each timed step.
        first_s: The first step, with what is compiled, in seconds.
        gib: The peak of a step on this rank's GPU; None on a CPU.
        loss: Of the first step.
    """

    ms: tuple[float, ...]
    first_s: float
    gib: float | None
    loss: float


@dataclass(frozen=True)
class Row:
    """One line of a comparison.

    Args:
        name: A key of :data:`WAYS`.
        ranks: That took part.
        sizes: Of the image.
        ms: The median step of the slowest rank, in milliseconds; None where there is none.
        spread_ms: From the first to the third quartile.
        first_s: The first step, in seconds.
        gib: The largest peak of a rank; None on CPUs.
        loss: Of the first step.
        refusal: Why there is no measurement.
    """

    name: str
    ranks: int
    sizes: tuple[int, ...]
    ms: float | None = None
    spread_ms: float | None = None
    first_s: float | None = None
    gib: float | None = None
    loss: float | None = None
    refusal: str = ""


def _eager(model: nn.Module, work: Work) -> nn.Module:
    del work
    return model


def _compiled(model: nn.Module, work: Work) -> nn.Module:
    model.compile(backend=work.inner_backend, dynamic=False)
    return model


def _checkpointed(model: nn.Module, work: Work) -> nn.Module:
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        msg = "the model has no set_grad_checkpointing, as timm's have"
        raise NotImplementedError(msg)
    switch(True)
    return _compiled(model, work)


def _split(model: nn.Module, work: Work) -> nn.Module:
    placements = [Shard(dim) for dim in work.dims]
    return transform(
        model, mesh=mesh(work.mesh_shape), placements=placements, inner_backend=work.inner_backend, **work.options
    )


def _dtensor(model: nn.Module, work: Work) -> nn.Module:
    ranks = mesh(work.mesh_shape)
    placements = [Shard(dim) for dim in work.dims]
    whole = [Replicate()] * ranks.ndim

    def sharded(_: nn.Module, inputs: tuple[Tensor, ...], __: object) -> tuple[Tensor, ...]:
        image, *others = inputs
        parts = distribute_tensor(image, ranks, placements, src_data_rank=None)
        return (parts, *(distribute_tensor(x, ranks, whole, src_data_rank=None) for x in others))

    def gathered(_: nn.Module, output: Any, __: object) -> Any:
        return output.full_tensor()

    return distribute_module(model, ranks, input_fn=sharded, output_fn=gathered)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Way:
    """How a row is run.

    Args:
        prepare: Takes the untouched model and the work; returns what is called.
        title: In a table.
        is_split: Whether all ranks take part.
        is_weak: Whether the image is enlarged.
        has_to_run: Whether a failure is an error, and not said in the row.
    """

    prepare: Callable[[nn.Module, Work], nn.Module]
    title: str
    is_split: bool = False
    is_weak: bool = False
    has_to_run: bool = False


WAYS = {
    "eager": Way(_eager, "one device, eager", has_to_run=True),
    "compiled": Way(_compiled, "one device, compiled", has_to_run=True),
    "checkpointed": Way(_checkpointed, "one device, compiled, checkpointed"),
    "strong": Way(_split, "fxshard, strong", is_split=True, has_to_run=True),
    "weak": Way(_split, "fxshard, weak", is_split=True, is_weak=True, has_to_run=True),
    "dtensor": Way(_dtensor, "DTensor, strong", is_split=True),
}
"""By the names of ``--rows``."""


def run_row(pool: RankPool, work: Work, name: str) -> Row:
    """Run one row.

    Args:
        pool: Has the ranks and the mesh of the work.
        work: What is trained.
        name: A key of :data:`WAYS`.

    Raises:
        WorkerError: A row failed that has to run, for another reason than that it needs too much memory.
    """
    way = WAYS[name]
    given = work.enlarged() if way.is_weak else work
    ranks = work.ranks if way.is_split else 1
    sizes = given.inputs[0].sizes
    try:
        found = pool.run(measure, given, name, ranks=ranks)
    except WorkerError as error:
        kinds = {cause.type_name for cause in error.causes.values()}
        if way.has_to_run and OUT_OF_MEMORY not in kinds:
            raise
        return Row(name, ranks, sizes, refusal=_reason(error))
    steps = [max(times) for times in zip(*(each.ms for each in found), strict=True)]
    low, median, high = statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3
    gib = max((each.gib for each in found if each.gib is not None), default=None)
    first_s = max(each.first_s for each in found)
    return Row(name, ranks, sizes, median, high - low, first_s, gib, found[0].loss)


def _reason(error: WorkerError) -> str:
    """Return the first line of what the first rank raised, which may be the only one: the others wait for it."""
    if not error.causes:
        return "no answer in time"
    cause = error.causes[min(error.causes)]
    lines = cause.message.strip().splitlines() or [""]
    return f"{cause.type_name}: {lines[0][:MOST_WORDS]}"


def measure(rank: int, work: Work, name: str) -> Measured:
    """Train on this rank (runs in a rank process).

    Args:
        rank: Which one.
        work: What is trained.
        name: A key of :data:`WAYS`.
    """
    del rank
    free(work)
    try:
        with dead_draws_kept():  # compiled models draw what eager ones do
            return _trained(work, WAYS[name])
    finally:
        free(work)


def free(work: Work) -> None:
    """Drop compiled code and the memory of the row before."""
    torch.compiler.reset()
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()


def _trained(work: Work, way: Way) -> Measured:
    torch.manual_seed(0)
    model = build_named(work.model, num_classes=1000).to(work.device).train()
    inputs = [given.drawn().to(work.device) for given in work.inputs]
    net = way.prepare(model, work)
    torch.manual_seed(1)
    started = time.perf_counter()
    loss = _step(net, inputs, work)
    first_s = time.perf_counter() - started
    for _ in range(WARM_UP - 1):
        _step(net, inputs, work)
    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(work.steps):
        if way.is_split:
            dist.barrier()
        net.zero_grad(set_to_none=True)
        started = time.perf_counter()
        _step(net, inputs, work)
        times.append((time.perf_counter() - started) * 1000)
    gib = torch.cuda.max_memory_allocated() / 2**30 if work.device == "cuda" else None
    return Measured(tuple(times), first_s, gib, loss)


def _step(net: nn.Module, inputs: Sequence[Tensor], work: Work) -> float:
    """Run forward and backward to their end; return the loss."""
    with work.precision():
        outputs = net(*inputs)
    floating = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    loss = torch.stack([x.float().square().mean() for x in floating if x.is_floating_point()]).sum()
    loss.backward()
    if work.device == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach())

"""The demo inside one rank: the split model and the untouched one are trained side by side and compared.

Each rank holds both::

    images (whole) ──▶ fxshard.transform(model)   this rank computes its part  ──▶ loss, gradients, AdamW step
                  └──▶ a copy of the model        on one device, eager mode    ──▶ loss, gradients, AdamW step
                                                                                   compared after every step

:func:`prepare`, :func:`train_step` and :func:`finish` are what a :class:`~fxshard.workers.RankPool` calls; what
lives between the calls is kept here.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from fxshard import backend
from fxshard.api import transform
from fxshard.compare import Difference, difference
from fxshard.errors import FxShardError
from fxshard.models import build_named
from fxshard.photographs import Photograph, load_photographs, make_batch
from fxshard.rank_process import MESH_DIM_NAMES, mesh
from fxshard.report import PlanReport, describe
from fxshard.trace import Step, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.tensor.placement_types import Placement

SPLITS = {"W": (3,), "H": (2,), "HW": (2, 3)}
"""The dimensions of (N, C, H, W) that are split, by what the command line calls them."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}
LEARNING_RATE = 2e-4
DROP_PATH_RATE = 0.1


@dataclass(frozen=True)
class Settings:
    """What the demo trains, and how.

    Args:
        model: A name that :func:`fxshard.models.build_named` knows.
        world_size: How many ranks, >= 2.
        size: (batch, height, width) of the images.
        steps: How many training steps, >= 1.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: ``"float64"`` or ``"float32"``.
        inner_backend: The Dynamo backend that runs the local graph.
        split: A key of :data:`SPLITS`.
        seed: Of weights, crops and random draws.
        torchrun: Whether torchrun started the ranks, and not a :class:`~fxshard.workers.RankPool`.
    """

    model: str
    world_size: int = 2
    size: tuple[int, int, int] = (2, 64, 512)
    steps: int = 5
    device: str = "cpu"
    dtype: str = "float64"
    inner_backend: str = "eager"
    split: str = "W"
    seed: int = 0
    torchrun: bool = False

    @property
    def placements(self) -> list[Placement]:
        """One placement for each mesh axis."""
        return [Shard(dim) for dim in SPLITS[self.split]]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks on each mesh axis; two axes are as near to a square as they get, the longer one along the width."""
        if len(SPLITS[self.split]) == 1:
            return (self.world_size,)
        rows = next(n for n in range(math.isqrt(self.world_size), 0, -1) if self.world_size % n == 0)
        return rows, self.world_size // rows


@dataclass(frozen=True)
class StepResult:
    """One training step, as one rank sees it.

    Args:
        loss_split: Of the model that is split over the ranks.
        loss_whole: Of the untouched model on one device.
        difference: Of outputs, gradients, buffers and generator states.
    """

    loss_split: float
    loss_whole: float
    difference: Difference

    @property
    def loss_difference(self) -> float:
        """The relative difference of the losses."""
        return abs(self.loss_split - self.loss_whole) / max(abs(self.loss_whole), math.ulp(0.0))

    @property
    def largest(self) -> float:
        """The largest relative difference of all."""
        return max(self.loss_difference, self.difference.error)


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps between forward and backward.

    Args:
        activations: Without the parameters and without copies of them.
        parameter_copies: Copies of parameters.
    """

    activations: int
    parameter_copies: int


@dataclass(frozen=True)
class Summary:
    """What one rank has to say at the end."""

    kept_split: Kept
    kept_whole: Kept
    report: PlanReport


class Side:
    """One of the two trainings.

    Args:
        net: What is trained; its parameters are updated.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
        self.kept = Kept(0, 0)

    def step(self, images: Tensor, labels: Tensor, seed: int) -> tuple[float, Step]:
        """Train one step and return the loss and what the step left behind."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        with saved_tensors() as saved:
            logits = self.net(images)
        self.kept = _kept(saved, self.net)
        saved.clear()  # so that the backward can free them
        loss = cross_entropy(logits, labels)
        loss.backward()
        left = Step(
            outputs={"logits": logits.detach().clone()},
            input_gradients={},
            parameter_gradients={n: None if p.grad is None else p.grad.clone() for n, p in self.net.named_parameters()},
            buffers={n: b.clone() for n, b in self.net.named_buffers()},
            generators=_generators(images.device),
        )
        self.optimizer.step()
        return loss.item(), left


@dataclass
class Training:
    """Both trainings of this rank."""

    settings: Settings
    photographs: tuple[Photograph, ...]
    split: Side
    whole: Side
    reports: list[PlanReport] = field(default_factory=list)

    def step(self, number: int) -> StepResult:
        """Train both on the same batch with the same seed."""
        settings = self.settings
        images, labels = make_batch(self.photographs, number, settings.size, settings.seed)
        images, labels = images.to(settings.device, DTYPES[settings.dtype]), labels.to(settings.device)
        loss_split, left_split = self.split.step(images, labels, settings.seed + number)
        loss_whole, left_whole = self.whole.step(images, labels, settings.seed + number)
        return StepResult(loss_split, loss_whole, difference(Trace((left_whole,)), Trace((left_split,))))


_training: list[Training] = []


def prepare(rank: int, settings: Settings) -> tuple[str, ...]:
    """Build both models in this rank.

    Args:
        rank: Not used: every rank builds the same.
        settings: What to train.

    Returns:
        The names of the photographs.
    """
    del rank
    photographs = load_photographs()
    torch.manual_seed(settings.seed)
    net = build_named(settings.model, num_classes=len(photographs), drop_path_rate=DROP_PATH_RATE, insist=True)
    net = net.to(settings.device, DTYPES[settings.dtype]).train()
    split = transform(
        copy.deepcopy(net), mesh=_mesh(settings), placements=settings.placements, inner_backend=settings.inner_backend
    )
    training = Training(settings, photographs, Side(split), Side(net))
    backend.on_compiled[:] = [lambda *compiled: training.reports.append(describe(*compiled))]
    _training[:] = [training]
    return tuple(photograph.name for photograph in photographs)


def train_step(rank: int, number: int) -> StepResult:
    """Train step ``number`` in this rank."""
    del rank
    return _training[0].step(number)


def finish(rank: int) -> Summary:
    """Return this rank's summary and forget the training.

    Raises:
        FxShardError: Nothing was compiled.
    """
    training = _training.pop()
    backend.on_compiled.clear()
    if not training.reports:
        msg = f"rank {rank} compiled nothing: the model was not split"
        raise FxShardError(msg)
    return Summary(training.split.kept, training.whole.kept, training.reports[-1])


def _mesh(settings: Settings) -> DeviceMesh:
    if not settings.torchrun:
        return mesh(settings.mesh_shape)
    names = MESH_DIM_NAMES[len(settings.mesh_shape)]
    return init_device_mesh(settings.device, settings.mesh_shape, mesh_dim_names=names)


@contextmanager
def saved_tensors() -> Iterator[dict[int, Tensor]]:
    """Collect what autograd saves for the backward, by the address of its storage."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _kept(saved: dict[int, Tensor], net: nn.Module) -> Kept:
    parameters = {p.untyped_storage().data_ptr(): _flat(p.detach()) for p in net.parameters()}
    others = [_flat(tensor) for address, tensor in saved.items() if address not in parameters]
    copies = [tensor for tensor in others if any(_same(tensor, parameter) for parameter in parameters.values())]
    return Kept(sum(t.nbytes for t in others) - sum(t.nbytes for t in copies), sum(t.nbytes for t in copies))


def _flat(tensor: Tensor) -> Tensor:
    """Return all that the tensor's memory holds, in the order of the memory."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states

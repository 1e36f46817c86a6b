"""``fxshard demo``: an unmodified model trained with its images split over ranks, next to one device.

The command starts its ranks itself, or uses torchrun's.  Each rank trains both
(:mod:`fxshard.demo_rank`) on crops of scikit-image's photographs (:mod:`fxshard.photographs`); the command
shows the losses side by side, what each rank keeps and sends, and writes the plan to a file.  The trainings are
the same if all of this holds, on every rank and after every step::

    float64    relative difference of outputs, gradients and buffers <= 1e-9     (the contract: rounding)
    float32    of the losses <= 1e-4, of all the rest <= 1e-2                     (rounding, amplified by the steps)

and no gradient is missing and the random generators are in the same state.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.distributed as dist
from rich.console import Console

from fxshard.demo_rank import Settings, StepResult, Summary, finish, prepare, train_step
from fxshard.demo_screen import Screen, gather_table, heading, notes, rank_table, verdict
from fxshard.errors import FxShardError
from fxshard.mesh import start_process_group
from fxshard.models import find_model
from fxshard.optional import require
from fxshard.workers import RankPool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

LIMITS = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-2)}
"""By dtype, the largest relative difference of the losses and of everything else."""

_TIMEOUT_S = 1800.0

_LEFT_BEHIND = "ignore:resource_tracker:UserWarning"
"""Ranks that Ctrl-C ends leave semaphores of tqdm behind; Python's tracker cleans them up, and would warn of it."""


class Ranks(Protocol):
    """Processes that run a function together; a :class:`~fxshard.workers.RankPool`, or torchrun's."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(rank, *args)`` in every rank and return all results."""


class TorchrunRanks:
    """The processes that torchrun has started, seen from one of them.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> Self:
        start_process_group(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dist.destroy_process_group()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(rank, *args)`` here and exchange the results."""
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(dist.get_rank(), *args))
        return results


def run(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if the two trainings are the same, 1 if they differ.

    Raises:
        FxShardError: A package is missing, or the settings do not fit this machine.
    """
    settings = make_settings(arguments)
    _check(settings, arguments.plan)
    find_model(settings.model)
    require("skimage")
    console = Console(quiet=settings.torchrun and os.environ["RANK"] != "0", highlight=False)
    with Screen(settings, console) as screen, _ranks(settings) as ranks:
        results, summaries = _train(ranks, settings, screen)
    if not console.quiet:
        arguments.plan.write_text(summaries[0].report.to_json() + "\n")
    _print_summary(console, settings, summaries)
    same = judge(results, settings.dtype)
    console.print(f"Plan, node by node: [bold]{arguments.plan}[/]")
    console.print(verdict(results, LIMITS[settings.dtype], same=same))
    return 0 if same else 1


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the arguments and torchrun's environment ask for.

    Raises:
        FxShardError: They contradict each other.
    """
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if torchrun else arguments.world_size or 2
    if arguments.world_size not in (None, world_size):
        msg = f"--world-size {arguments.world_size}, but torchrun started {world_size} ranks; leave the option out"
        raise FxShardError(msg)
    gpus = torch.cuda.device_count()
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size) if torchrun else world_size)
    device = arguments.device or ("cuda" if enough else "cpu")
    if device == "cuda" and not enough:
        msg = f"{world_size} ranks need a GPU each, and there are {gpus}; lower --world-size or use --device cpu"
        raise FxShardError(msg)
    return Settings(
        model=arguments.model,
        world_size=world_size,
        size=(arguments.batch, arguments.height, arguments.width),
        steps=arguments.steps,
        device=device,
        dtype=arguments.dtype,
        inner_backend=arguments.inner_backend or ("inductor" if device == "cuda" else "eager"),
        split=arguments.split,
        seed=arguments.seed,
        torchrun=torchrun,
    )


def _check(settings: Settings, plan: Path) -> None:
    if min(settings.world_size, *settings.mesh_shape) < 2:
        msg = (
            f"--world-size {settings.world_size} leaves nothing to split with --split {settings.split}; "
            "use 2 or more, and 4, 6, 8, 9, ... to split both"
        )
        raise FxShardError(msg)
    if not plan.absolute().parent.is_dir():
        msg = f"--plan {plan}: there is no folder {plan.absolute().parent}"
        raise FxShardError(msg)


def _ranks(settings: Settings) -> RankPool | TorchrunRanks:
    if settings.torchrun:
        return TorchrunRanks(settings.device)
    if _LEFT_BEHIND not in sys.warnoptions:
        sys.warnoptions.append(_LEFT_BEHIND)
    return RankPool(settings.world_size, device=settings.device, timeout_s=_TIMEOUT_S, meshes=[settings.mesh_shape])


def _train(ranks: Ranks, settings: Settings, screen: Screen) -> tuple[list[list[StepResult]], list[Summary]]:
    """Train, and show each step when it is done; the results are by step and rank."""
    screen.doing("building the models in each")
    photographs = ranks.run(prepare, settings)[0]
    screen.console.print(heading(settings, photographs))
    results: list[list[StepResult]] = []
    for number in range(settings.steps):
        screen.doing(f"step {number + 1} of {settings.steps}" + ("" if number else ", which compiles"))
        results.append(ranks.run(train_step, number))
        screen.show(results)
    return results, ranks.run(finish)


def _print_summary(console: Console, settings: Settings, summaries: Sequence[Summary]) -> None:
    console.print(rank_table(settings, summaries))
    console.print(notes(summaries))
    gathers = gather_table(summaries[0].report)
    console.print("Nothing is gathered." if gathers is None else gathers)


def judge(results: Sequence[Sequence[StepResult]], dtype: str) -> bool:
    """Return whether the trainings are the same: by every rank, after every step.

    Args:
        results: By step and rank.
        dtype: A key of :data:`LIMITS`.
    """
    loss_limit, limit = LIMITS[dtype]
    return all(
        result.difference.exact(limit) and result.loss_difference <= loss_limit for step in results for result in step
    )

"""What ``fxshard demo`` shows: the losses while it trains, then what each rank keeps and sends.

::

    Screen            the losses so far, and a progress bar under them until the training is done
    heading           what is trained
    loss_table        both losses of each step
    rank_table        activations and communication of each rank
    gather_table      what is gathered, and why
    verdict           same or not
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fxshard.ops.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from fxshard.demo_rank import Settings, StepResult, Summary
    from fxshard.report import NodeReport, PlanReport

DIGITS = {"float64": 12, "float32": 7}
"""Of a loss, by dtype: so many that rounding shows."""

SPLIT_WORDS = {"W": "width", "H": "height", "HW": "height and width"}
WHOLE_RESULT = "outputs come back whole"
MERGED_PARTS = "the ranks' parts are put together, such as statistics"
SLICED_GRADIENT = "backward of a slice: its gradient is put together"
_SENT = {
    "halo": "halo exchanged",
    "gather": "gathered",
    "redistribute": "split anew",
    "reduce": "statistics all-reduced",
    "gradient": "gradients all-reduced",
}
_MOST_COLUMNS = 4
"""For more ranks than these the table of ranks shows the least and the most."""

_WHERE_WIDTH = 22


class Screen:
    """The live part: the table of losses above a progress bar, which goes when the training is done.

    Args:
        settings: What is trained.
        console: Where to.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("", total=settings.steps)
        self._losses: RenderableType = Text()
        self._live = Live(self._progress, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        self.doing(f"starting {self.settings.world_size} ranks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.update(self._losses)
            self._live.stop()
        else:
            self.console.print(self._losses)

    def doing(self, what: str) -> None:
        """Name what happens now, in a line of its own where nothing moves."""
        self._progress.update(self._task, description=what)
        if not self.console.is_terminal:
            self.console.print(f"{what} ...")
            self.console.file.flush()  # a pipe's reader waits too

    def show(self, results: Sequence[Sequence[StepResult]]) -> None:
        """Show the steps so far."""
        self._progress.update(self._task, completed=len(results))
        self._losses = loss_table(results, self.settings)
        self._live.update(Group(self._losses, self._progress))


def heading(settings: Settings, photographs: Sequence[str]) -> str:
    """Return what is trained, in three lines."""
    batch, height, width = settings.size
    backend = "gloo" if settings.device == "cpu" else "nccl"
    mesh = " x ".join(map(str, settings.mesh_shape))
    return (
        f"[bold]{settings.model}[/] on {batch} x 3 x {height} x {width} {settings.dtype} crops of "
        f"{len(photographs)} photographs: {', '.join(photographs)}\n"
        f"[bold]{mesh} ranks[/] ({settings.device}, {backend}, {settings.inner_backend}), "
        f"the {SPLIT_WORDS[settings.split]} of the images split\n"
        f"[bold]one device[/]: the untouched model in eager mode, same seed, same batches"
    )


def loss_table(results: Sequence[Sequence[StepResult]], settings: Settings) -> Table:
    """Return both losses of each step and how far apart the trainings are.

    Args:
        results: By step and rank; the rank that differs most is shown.
        settings: Says the ranks and the dtype.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("step", f"loss on\n{settings.world_size} ranks", "loss on\none device", "largest\ndifference"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("\nof", no_wrap=True)
    digits = DIGITS[settings.dtype]
    for number, ranks in enumerate(results, 1):
        worst = max(ranks, key=lambda result: (len(result.difference.mismatches), result.largest))
        losses = (f"{loss:.{digits}f}" for loss in (worst.loss_split, worst.loss_whole))
        table.add_row(str(number), *losses, f"{worst.largest:.1e}", _where(worst))
    return table


def _where(result: StepResult) -> str:
    """Return the tensor that differs most, the end of its name at least."""
    worst = max(result.difference.worst.values(), key=lambda worst: worst.error, default=None)
    where = worst.where if worst else ""
    if result.difference.mismatches:
        where = result.difference.mismatches[0].where
    name = where.partition(", ")[2].removeprefix("parameter ")
    return name if len(name) <= _WHERE_WIDTH else "…" + name[1 - _WHERE_WIDTH :]


def rank_table(settings: Settings, summaries: Sequence[Summary]) -> Table:
    """Return what each rank keeps for the backward and sends in a training step, next to one device.

    Args:
        settings: Says how many ranks.
        summaries: By rank.
    """
    few = settings.world_size <= _MOST_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, title="One training step", title_justify="left", title_style="bold")
    table.add_column("")
    ranks = [f"rank {rank}" for rank in range(len(summaries))] if few else ["least", "most"]
    for title in ("one device", *ranks):
        table.add_column(title, justify="right", no_wrap=True)
    whole = summaries[0].kept_whole.activations
    kept = [summary.kept_split.activations for summary in summaries]
    columns = kept if few else [min(kept), max(kept)]
    table.add_row("activations kept", megabytes(whole), *map(megabytes, columns))
    table.add_row("  of one device", "", *(f"{100 * part / whole:.0f} %" if whole else "" for part in columns))
    for kind, title in _SENT.items():
        sent = [summary.report.total.of(kind) for summary in summaries]
        if any(traffic.messages for traffic in sent):
            sent = sent if few else [f(sent, key=lambda traffic: traffic.bytes) for f in (min, max)]
            table.add_row(title, "", *(megabytes(traffic.bytes) for traffic in sent))
            table.add_row("  messages", "", *(str(traffic.messages) for traffic in sent))
    return table


def notes(summaries: Sequence[Summary]) -> str:
    """Return how the numbers of :func:`rank_table` were counted."""
    copies = max(summary.kept_split.parameter_copies for summary in summaries)
    extra = f" and the {megabytes(copies)} of copies of them that this inner backend makes" if copies else ""
    return (
        "Activations kept: bytes that autograd saves for the backward (saved_tensors_hooks), without "
        f"parameters{extra}. Messages and bytes: what a rank sends, forward and backward, counted in the "
        "plan; an all-reduce is one message and counts its payload once."
    )


def gather_table(report: PlanReport) -> Table | None:
    """Return what is gathered and why, or None where nothing is.

    Args:
        report: Of any rank.
    """
    rows: dict[str, list[NodeReport]] = defaultdict(list)
    for node in report.nodes:
        if node.reason or node.sent.of("gather").messages:
            rows[_gather_reason(node)].append(node)
    if not rows:
        return None
    table = Table(box=box.SIMPLE_HEAD, title="Gathered", title_justify="left", title_style="bold")
    table.add_column("why")
    table.add_column("nodes", justify="right")
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("first at", overflow="fold")
    for reason, nodes in rows.items():
        sent = sum((node.sent.of("gather") for node in nodes), Traffic())
        table.add_row(reason, str(len(nodes)), megabytes(sent.bytes), nodes[0].module or nodes[0].source)
    return table


def _gather_reason(node: NodeReport) -> str:
    if node.reason or node.op == "output":
        return node.reason or WHOLE_RESULT
    return MERGED_PARTS if "gather" in node.sent.forward else SLICED_GRADIENT


def verdict(results: Sequence[Sequence[StepResult]], limits: tuple[float, float], *, same: bool) -> str:
    """Return whether the trainings are the same, with the figures.

    Args:
        results: By step and rank.
        limits: The largest relative difference of the losses and of all the rest.
        same: The judgement.
    """
    every = [result for step in results for result in step]
    loss, largest = max(r.loss_difference for r in every), max(r.difference.error for r in every)
    figures = f"losses {loss:.1e} (limit {limits[0]:g}); logits, gradients, buffers {largest:.1e} (limit {limits[1]:g})"
    mismatches = [str(mismatch) for r in every for mismatch in r.difference.mismatches]
    first = f"; {mismatches[0]}" if mismatches else ""
    word = "[bold green]The same training[/]" if same else "[bold red]The trainings differ[/]"
    return f"{word}: largest relative difference of {figures}{first}"


def megabytes(count: float) -> str:
    """Return a number of bytes in decimal units.

    Example:
        >>> megabytes(999), megabytes(31_200_000)
        ('999 B', '31.2 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"

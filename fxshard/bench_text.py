"""What a comparison says: a table, JSON, and a picture of time and memory against the size of the image."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from fxshard.bench import WAYS
from fxshard.optional import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fxshard.bench import Row, Work

HEAD = ("", "image", "ms", "+-", "GiB", "first s", "efficiency", "loss differs")


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table; what has no measurement has its reason below it."""
    cells = [HEAD, *(_cells(row, rows) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    lines = [
        "  ".join(
            text.rjust(width) if column > 1 else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return [*lines, *(f"{WAYS[row.name].title}: {row.refusal}" for row in rows if row.refusal)]


def efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    """Return which part of perfect scaling a row of several ranks has, against one device; None where it has none.

    Args:
        row: Its ranks and time: t_n.
        rows: With the compiled one of one device, or else the eager one: t_1.

    Returns:
        ``t_1 / t_n`` for weak scaling, ``t_1 / (n t_n)`` for strong.
    """
    times = {each.name: each.ms for each in rows if each.ranks == 1 and each.ms is not None}
    one = times.get("compiled", times.get("eager"))
    way = WAYS[row.name]
    if not way.is_split or row.ms is None or one is None:
        return None
    return one / (row.ms if way.is_weak else row.ranks * row.ms)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    way, image = WAYS[row.name], "x".join(map(str, row.sizes))
    title = f"{way.title}, {row.ranks} ranks" if way.is_split else way.title
    if row.ms is None:
        return (title, image, *("-" for _ in HEAD[2:]))
    part = efficiency(row, rows)
    return (
        title,
        image,
        f"{row.ms:.1f}",
        f"{row.spread_ms or 0:.1f}",
        "-" if row.gib is None else f"{row.gib:.2f}",
        f"{row.first_s or 0:.1f}",
        "-" if part is None else f"{100 * part:.0f} %",
        _difference(row, rows),
    )


def _difference(row: Row, rows: Sequence[Row]) -> str:
    """Return how far a loss is from the eager one of the same image."""
    losses = [each.loss for each in rows if each.name == "eager" and each.sizes == row.sizes]
    if row.name == "eager" or row.loss is None or not losses or losses[0] is None:
        return "-"
    return f"{abs(row.loss - losses[0]) / max(abs(losses[0]), 1e-30):.1e}"


def to_json(rows: Sequence[Row], work: Work, command: str, series: Sequence[Row] = ()) -> str:
    """Return a comparison as JSON: ``about``, ``rows``, and ``series``, the rows of other sizes.

    Args:
        rows: Of the table.
        work: What was trained.
        command: That was given.
        series: Of the picture.
    """
    device = torch.cuda.get_device_name() if work.device == "cuda" else f"{platform.machine()} CPU, one thread a rank"
    about = {
        "command": command,
        "device": device,
        "torch": torch.__version__,
        "fxshard": version("fxshard"),
        "date": time.strftime("%Y-%m-%d"),
        "dtype": work.dtype,
        "inner_backend": work.inner_backend,
        "mesh_shape": work.mesh_shape,
        "dims": work.dims,
    }
    every: dict[str, Any] = {"about": about, "rows": [_as_json(row, rows) for row in rows]}
    if series:
        every["series"] = [asdict(row) for row in series]
    return json.dumps(every, indent=1)


def _as_json(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    return {**asdict(row), "efficiency": efficiency(row, rows)}


def plot(series: Sequence[Row], dim: int, path: Path) -> None:
    """Draw time and memory against a size of the image, a line for each way.

    Args:
        series: Rows of several sizes.
        dim: The dimension whose size that is.
        path: Of the picture.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figures = load("matplotlib.figure")
    kinds = {"ms": "a step, ms", "gib": "peak of a rank, GiB"}
    shown = {name: text for name, text in kinds.items() if any(getattr(row, name) is not None for row in series)}
    figure = figures.Figure(figsize=(5 * len(shown), 4), layout="constrained")
    for axes, (name, text) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for title, points in _lines(series, dim, name).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=title)
        axes.set(xlabel=f"size of dimension {dim}", ylabel=text, ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def _lines(series: Sequence[Row], dim: int, name: str) -> Mapping[str, list[tuple[int, float]]]:
    """Return the points of each line: a size, and a measurement."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in series:
        value = getattr(row, name)
        if value is not None:
            way = WAYS[row.name]
            title = f"{row.ranks} ranks" if way.is_split else way.title
            found.setdefault(title, []).append((row.sizes[dim], value))
    return found

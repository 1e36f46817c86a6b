"""The coverage page: every model with what was found on each mesh.

One row a model; its plan is the last that was made.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from tools.zoo.check import FACTOR, LIMIT
from tools.zoo.models import CNNS, HYBRIDS, source_of
from tools.zoo.survey import SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tools.zoo.verdict import Setting, Survey, Verdict

LEAST_SHARE = 0.99
"""Of a CNN's FLOPs, that must run split."""
MOST_REASONS = 3

ABOUT = f"""\
For each model one training step in float64 on gloo ranks is compared with the untouched model on one device: outputs,
input gradient, parameter gradients, buffers and generator state. *Exact* is a relative error of at most {LIMIT:.0e}.
*Own rounding* is a larger error that is at most {FACTOR:g} times what the untouched model shows against itself when
weights, image and the result of each operation are moved by one unit in the last place; both figures are given. They
may be as large as 1, which is 100 %: the last maps of some untrained networks have two positions for a channel at these
sizes, batch norms divide by the difference of two nearly equal numbers, and a unit in the last place of the image then
moves a whole gradient, on one device too (monai:SEResNet50: one volume, maps of 1 x 1 x 2, gradients of 1e8). No more
than that is said of the ranks by such a row.

The other columns are those of the plan for images of {SIZE[0]} x {SIZE[1]} pixels (models of one size: their own):
the share of the FLOPs (convolutions and matrix products of the forward) that runs split; the largest tensor that ranks
put together, outputs and partial sums apart, against the largest value at the network's coarsest resolution, in
thousands of elements; and what a rank sends in halos in a step, forward and backward.
"""
HEAD = """\
| model | exact | FLOPs split | gather / feature map, k | halo KB | gathered because |
|---|---|---|---|---|---|"""


def page(verdicts: Sequence[Verdict], files: Sequence[Path] = ()) -> str:
    """Return the coverage page in Markdown.

    Args:
        verdicts: Of all models and meshes.
        files: Where they were read from, for the command in the header.
    """
    models: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        models[verdict.model].append(verdict)
    ran = {name: found for name, found in models.items() if any(v.good and v.state != "not installed" for v in found)}
    parts = [
        "# Coverage",
        _header(verdicts, files),
        ABOUT.rstrip(),
        _totals(models),
        *_tables(ran),
        *_failures("Wrong", "differs", verdicts),
        *_failures("Cannot run", "fails", verdicts),
        *_failures("Not installed", "not installed", verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def _header(verdicts: Sequence[Verdict], files: Sequence[Path]) -> str:
    named = f" --from {' '.join(file.name for file in files)}" if files else ""
    lines = [
        f"Written by `python -m tools.zoo --page docs/coverage.md{named}` on {time.strftime('%Y-%m-%d')} from:",
        "",
    ]
    runs: dict[Setting, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        runs[verdict.setting].append(verdict)
    for setting, found in runs.items():
        versions = ", ".join(sorted({v.torch_version for v in found}))
        lines.append(
            f"- {setting} (what is split / over how many ranks), images of {setting.size[0]} x {setting.size[1]}: "
            f"{len(found)} models, torch {versions}"
        )
    return "\n".join(lines)


def _totals(models: dict[str, list[Verdict]]) -> str:
    lines = []
    for setting in dict.fromkeys(v.setting for found in models.values() for v in found):
        states = [v.state for found in models.values() for v in found if v.setting == setting]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        lines.append(f"- {setting}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    plans = [s for name, found in models.items() if name in CNNS and (s := _plan(found)) is not None]
    if plans:
        least = min(s.split_share for s in plans)
        full = sum(s.split_share >= LEAST_SHARE for s in plans)
        small = sum(s.gather_elements <= s.feature_map_elements for s in plans)
        lines.append(
            f"- {full} of {len(plans)} CNNs run at least {LEAST_SHARE:.0%} of their FLOPs split "
            f"(the least: {least:.2%}); {small} gather nothing larger than the feature map"
        )
    return "\n".join(lines)


def _tables(models: dict[str, list[Verdict]]) -> list[str]:
    attention = [name for name in models if name in HYBRIDS]
    plain = [name for name in models if name not in HYBRIDS]
    titles = {"Networks of convolutions": plain, "With attention or mixing of tokens": attention}
    return [
        "\n".join([f"## {title}", "", HEAD, *(_row(name, models[name]) for name in sorted(names, key=_place))])
        for title, names in titles.items()
        if names
    ]


def _place(name: str) -> tuple[str, str]:
    return source_of(name)


def _row(name: str, found: Sequence[Verdict]) -> str:
    about = _plan(found)
    exact = "; ".join(_outcome(v) for v in found if v.state != "planned") or "not compared"
    if about is None:
        return f"| {name} | {exact} | | | | |"
    gather = f"{about.gather_elements / 1e3:,.1f} / {about.feature_map_elements / 1e3:,.1f}"
    halo = f"{about.halo_bytes / 1e3:,.0f}"
    return f"| {name} | {exact} | {about.split_share:.2%} | {gather} | {halo} | {_reasons(about)} |"


def _outcome(verdict: Verdict) -> str:
    if verdict.state == "exact":
        return str(verdict.setting)
    if verdict.state == "own rounding":
        return f"{verdict.setting}: own rounding, {verdict.error:.1e} against {verdict.own_error:.1e}"
    return f"**{verdict.setting}: {verdict.state}**"


def _plan(found: Sequence[Verdict]) -> Survey | None:
    return next((v.survey for v in reversed(found) if v.survey is not None), None)


def _reasons(about: Survey) -> str:
    ordered = sorted(about.reasons.items(), key=lambda item: -item[1])
    shown = [f"{reason} ({count})" for reason, count in ordered[:MOST_REASONS]]
    more = len(ordered) - len(shown)
    return _cell("; ".join(shown) + (f"; {more} more" if more else ""))


def _failures(title: str, state: str, verdicts: Sequence[Verdict]) -> list[str]:
    found = [v for v in verdicts if v.state == state]
    if not found:
        return []
    return ["\n".join([f"## {title}", "", *(f"- {v.model} ({v.setting}): {_cell(v.note)}" for v in found)])]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")

"""Writes ``docs/operators.md`` from the registry of rules: which ATen operators run on a split image, and how.

    python tools/list_operators.py

A user's model is captured as ATen operators; ``docs/operators.md`` is where to look one up that a plan gathers.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path

import torch

from fxshard.rules import registered

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
HEAD = """# Operators

Written by `python tools/list_operators.py` from the rules in `fxshard/rules`.

A model is captured as ATen operators. One that is listed here runs on the split tensor, with what it needs from other
ranks (a halo, a sum, a statistic), in the cases that its family says; in the others, and for an operator that is
neither listed nor made of listed ones by ATen's own decomposition, its inputs are gathered and the plan says why. An
in-place operator counts as its functional form.
"""


def families() -> dict[str, tuple[str, set[str]]]:
    """Return, for each file of rules, its sentence and its operators' names."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    sentences: dict[str, str] = {}
    for key, rule in registered().items():
        module = inspect.getmodule(inspect.unwrap(rule.place))
        assert module is not None
        family = module.__name__.rpartition(".")[2]
        sentences[family] = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ").rstrip(".:")
        names[family].add(_shown(key))
    return {family: (sentences[family], names[family]) for family in sorted(names)}


def _shown(key: torch._ops.OpOverload | torch.Tag) -> str:
    if isinstance(key, torch._ops.OpOverload):
        return f"`{key.namespace}.{key._schema.name.rpartition('::')[2]}`"
    return f"every operator that torch tags `{key.name}`"


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for family, (sentence, names) in families().items():
        lines += [f"## {family.replace('_', ' ').capitalize()}", "", f"{sentence}.", "", ", ".join(sorted(names)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())

"""An extension of mkdocstrings: docstrings, which are written for ``help()``, as Markdown.

Example:                    Examples:       the word that makes a section of them
:func:`fxshard.plan`        `fxshard.plan`
Before::                    Before:         an indented block is code to Markdown anyway
"""

from __future__ import annotations

import re
from typing import Any

import griffe

RULES = (
    (re.compile(r"^( *)Example:$", re.MULTILINE), r"\1Examples:"),
    (re.compile(r":\w+:`~?([^`]+)`"), r"`\1`"),
    (re.compile(r"^ *::\n\n", re.MULTILINE), ""),
    (re.compile(r"::$", re.MULTILINE), ":"),
)


class Markdown(griffe.Extension):
    """Changes the docstrings of what is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    Example:
        >>> as_markdown("See :func:`fxshard.plan`.  So::")
        'See `fxshard.plan`.  So:'
    """
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text

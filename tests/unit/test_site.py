"""What the documentation site makes of docstrings and of the command line's help."""

from __future__ import annotations

import pytest

from fxshard.cli import COMMANDS
from tools.site_help import MARK, on_page_markdown


def test_the_help_of_every_command_is_on_its_page() -> None:
    page = on_page_markdown(f"before\n{MARK}\nafter")
    assert all(f"### fxshard {command.name}\n" in page for command in COMMANDS)
    assert "usage: fxshard plan" in page
    assert "--world-size WORLD_SIZE" in page
    assert on_page_markdown("another page") == "another page"


def test_docstrings_become_markdown() -> None:
    docstrings = pytest.importorskip(
        "tools.site_docstrings", reason="needs griffe, of the extra docs", exc_type=ImportError
    )
    text = "See :func:`~fxshard.plan`.  Before::\n\n    code\n\nExample:\n    >>> 1\n"
    assert docstrings.as_markdown(text) == "See `fxshard.plan`.  Before:\n\n    code\n\nExamples:\n    >>> 1\n"

"""A hook of mkdocs: the help of each command of ``fxshard`` on the page of the reference, as the command prints it.

``<!-- help of the commands -->`` on a page is replaced.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from fxshard.cli import COMMANDS, make_parser

MARK = "<!-- help of the commands -->"
COLUMNS = 100


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with the help in the place of the mark."""
    return markdown.replace(MARK, commands_help()) if MARK in markdown else markdown


def commands_help() -> str:
    """Return a section for each command."""
    (parsers,) = (action.choices for action in make_parser()._actions if action.dest == "command")
    assert isinstance(parsers, dict)
    return "\n\n".join(_section(parsers[command.name]) for command in COMMANDS)


def _section(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = functools.partial(argparse.HelpFormatter, width=COLUMNS)
    return f"### {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```"

"""``fxshard completion``: a script with which a shell completes commands, options and their choices.

    eval "$(fxshard completion bash)"                       in ~/.bashrc
    fxshard completion zsh > ~/.zfunc/_fxshard              in a folder of zsh's fpath
    fxshard completion tcsh > ~/.fxshard.tcsh               and "source" it in ~/.tcshrc

The script is made from the parser, and starts no Python when it completes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.optional import load

if TYPE_CHECKING:
    import argparse

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes what ``parser`` takes.

    Args:
        parser: Of the whole command line; where an argument is a path its files are completed.
        shell: One of :data:`SHELLS`.

    Raises:
        MissingPackageError: shtab, which writes the script, is not installed.
    """
    shtab = load("shtab")
    _complete_paths(parser, shtab.FILE)
    return str(shtab.complete(parser, shell))


def _complete_paths(parser: argparse.ArgumentParser, how: dict[str, str]) -> None:
    for action in parser._actions:  # argparse has no public list of them
        if action.type is Path:
            action.complete = how  # type: ignore[attr-defined]  # shtab reads it
        if isinstance(action.choices, dict):  # the commands' own parsers
            for command in action.choices.values():
                _complete_paths(command, how)

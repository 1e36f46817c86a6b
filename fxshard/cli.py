"""The command line: ``fxshard COMMAND ...``.

A command is one row of :data:`COMMANDS`: a module gives its arguments and runs it, and imports torch no earlier.
Models are also looked for in the current directory.  Exit status::

    0      done
    1      done, and the answer is no: the two trainings differ
    2      not done: wrong arguments, a missing package, something that cannot be split; one line says why
    130    interrupted
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import fxshard
from fxshard import (
    bench_command,
    completion_command,
    demo_arguments,
    doctor_command,
    draw_command,
    plan_command,
    verify_command,
)
from fxshard.errors import FxShardError
from fxshard.near_names import near

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAILED = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Args:
        name: What the user types.
        summary: One line for ``fxshard --help``.
        add_arguments: Adds its arguments to a parser.
        run: Runs it and returns the exit status.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _run_demo(arguments: argparse.Namespace) -> int:
    from fxshard.demo import run

    return run(arguments)


def _run_completion(arguments: argparse.Namespace) -> int:
    print(completion_command.script(make_parser(), arguments.shell))
    return 0


COMMANDS = (
    Command(
        "demo",
        "train a model split over ranks next to the same training on one device",
        demo_arguments.add_arguments,
        _run_demo,
    ),
    Command(
        "plan",
        "say what a model would hold and send on so many ranks, without running it",
        plan_command.add_arguments,
        plan_command.run,
    ),
    Command(
        "draw",
        "draw what a model would hold and send on so many ranks: a page, a picture or a graph file",
        draw_command.add_arguments,
        draw_command.run,
    ),
    Command(
        "verify",
        "compare a model on real ranks with the untouched model on one device",
        verify_command.add_arguments,
        verify_command.run,
    ),
    Command(
        "bench",
        "time one device and ranks at the same work, or measure them for the planner",
        bench_command.add_arguments,
        bench_command.run,
    ),
    Command(
        "doctor",
        "say whether this machine has what is needed, and whether two ranks on it agree with one device",
        doctor_command.add_arguments,
        doctor_command.run,
    ),
    Command(
        "completion",
        "print the script with which a shell completes this command line",
        completion_command.add_arguments,
        _run_completion,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments after the program's name; None is ``sys.argv[1:]``.

    Returns:
        The exit status.

    Raises:
        SystemExit: The arguments are wrong (status 2), or help or the version was asked for (status 0).
    """
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_near_options(arguments.parser, unknown)}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as python -m does, for module:factory
    try:
        return int(arguments.run(arguments))
    except FxShardError as error:
        print(f"fxshard {arguments.command}: {explain(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"fxshard {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _near_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    known = [text for action in parser._actions for text in action.option_strings]
    wrong = (text.partition("=")[0] for text in unknown if text.startswith("-"))
    return "".join(dict.fromkeys(near(text, known) for text in wrong))


def explain(error: FxShardError) -> str:
    """Return what the user needs of an error.

    Args:
        error: Where every rank raised one of fxshard's own errors, the first of their messages says it all; else
            the tracebacks are needed.
    """
    from fxshard.workers import WorkerError

    if not isinstance(error, WorkerError) or error.stacks:
        return str(error)
    own = _names_of(FxShardError)
    causes = [cause for _, cause in sorted(error.causes.items())]
    return causes[0].message if all(cause.type_name in own for cause in causes) else str(error)


def _names_of(kind: type[FxShardError]) -> set[str]:
    return {kind.__name__}.union(*(_names_of(derived) for derived in kind.__subclasses__()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="fxshard", description=fxshard.__doc__)
    parser.add_argument("--version", action="version", version=f"fxshard {fxshard.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(one)
        one.set_defaults(run=command.run, parser=one)
    return parser

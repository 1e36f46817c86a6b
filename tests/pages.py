"""The pages of the project, README and ``docs``, as blocks: what on them is a command or a program, and what is said.

A command is a line that a reader could type, wherever it stands::

    ```console                      a line after "$ ", with what it prints below it
    ```                             the same, or a line that begins with the name of a program
        pytest                      an indented line that begins so
    `fxshard doctor`                a span of code that begins so and has an argument, or is a command on its own

Lines are cut at ``&&``.  A program is a fenced block of Python: with a ``title`` a file, with prompts a doctest.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
)
PROGRAMS = (
    *(".ci/run", "dot", "fxshard", "mkdocs", "npm", "pip"),
    *("pre-commit", "pytest", "python", "python3.11", "torchrun"),
)
ALONE = ("fxshard demo", "fxshard doctor")
"""Commands that need no argument; without one, others are only named."""
FENCE = re.compile(
    r"^```(?P<language>[\w-]*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=^))(?:    [^\n]*\n|\n(?=    ))+")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ROUNDED = re.compile(r"\b\d(?:\.\d+)?e[-+]?\d+\b")
"""An error by rounding: other on every machine."""


@dataclass(frozen=True)
class Block:
    """A part of a page.

    Args:
        page: The file, from the root of the repository.
        line: Where it begins.
        language: What the fence says; ``"indented"`` and ``"span"`` for other code.
        text: Without fences and indentation.
        title: The file that it is, for a program that is one.
    """

    page: str
    line: int
    language: str
    text: str
    title: str = ""

    @property
    def commands(self) -> list[Command]:
        """What a reader could type, in order."""
        return list(_commands(self))

    @property
    def is_program(self) -> bool:
        """Whether it is Python."""
        return self.language in ("python", "pycon", "py")

    @property
    def is_doctest(self) -> bool:
        """Whether it is Python with prompts, and what is printed."""
        return self.language == "pycon"


@dataclass(frozen=True)
class Command:
    """Something to type.

    Args:
        text: The command line.
        page: Where it stands.
        line: In which line.
        said: What the page says that it prints; empty where it does not say.
    """

    text: str
    page: str
    line: int
    said: str = ""

    @property
    def program(self) -> str:
        """The first word."""
        return self.text.split()[0]


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Return the blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    rest = FENCE.sub(_empty_lines, text)  # so that lines keep their numbers
    prose = INDENTED.sub(_empty_lines, rest)
    found = [Block(page, _line(text, m), m["language"], m["text"], m["title"] or "") for m in FENCE.finditer(text)]
    found += [Block(page, _line(rest, m), "indented", textwrap.dedent(m[0])) for m in INDENTED.finditer(rest)]
    found += [Block(page, _line(prose, m), "span", " ".join(m[1].split())) for m in SPAN.finditer(prose)]
    return tuple(sorted(found, key=lambda block: block.line))


def commands(page: str) -> list[Command]:
    """Return what a reader of a page could type, in order."""
    return [command for block in blocks(page) for command in block.commands]


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _empty_lines(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _commands(block: Block) -> Iterator[Command]:
    if block.is_program:
        return
    _, *prompted = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    for part in prompted:
        line, _, said = part.partition("\n")
        *before, last = _typed(line)
        yield from (Command(text, block.page, block.line) for text in before)
        yield Command(last, block.page, block.line, said)
    for line in [] if prompted else block.text.splitlines():
        if _begins_with_a_program(line, span=block.language == "span"):
            yield from (Command(text, block.page, block.line) for text in _typed(line))


def _begins_with_a_program(line: str, *, span: bool) -> bool:
    first, _, rest = line.strip().partition(" ")
    if first not in PROGRAMS:
        return False
    if not span or line in ALONE or first == ".ci/run":
        return True
    return " " in rest if first == "fxshard" else bool(rest)


def _typed(line: str) -> list[str]:
    """Return the commands of a line, without its comment."""
    return [part.strip() for part in re.sub(r"\s{2,}#.*| # .*", "", line).split(" && ")]


def says(page: str, printed: str) -> bool:
    """Return whether what a page says is what was printed.

    Args:
        page: What the page says: ``...`` stands for anything, white space for white space, and a number with an
            exponent, which is an error by rounding, for any such number.
        printed: What a command printed.

    Example:
        >>> says("a   b ... 2.1e-16", "a b c d 3e-17")
        True
        >>> says("a b", "a c")
        False
    """
    shown, found = (" ".join(ROUNDED.sub("#", text).split()) for text in (page, printed))
    pattern = ".*?".join(re.escape(part.strip()) for part in shown.split("..."))
    return re.fullmatch(pattern, found) is not None

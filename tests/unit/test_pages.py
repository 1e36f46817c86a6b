"""Every command and program in README and on the pages of ``docs`` is one that some test runs."""

from __future__ import annotations

import re
import shlex

import pytest

from fxshard.cli import make_parser
from tests import page_commands
from tests.pages import PAGES, ROOT, Block, Command, blocks, commands, says
from tests.ranks import test_composition_page, test_readme
from tools.zoo.page import ABOUT

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
LISTED = (page_commands.ELSEWHERE, page_commands.SMALLER, page_commands.AT_NIGHT)
STARTED = ("python", "torchrun")
"""The programs that ``test_pages.py`` starts with a file of the page."""


def can_start(command: Command, page: str) -> bool:
    """Whether ``test_pages.py`` can run a command: one of fxshard's, or a file of the page."""
    files = {block.title for block in blocks(page)}
    return command.program == "fxshard" or (command.program in STARTED and command.text.split()[-1] in files)


def is_run(program: Block) -> bool:
    """Whether a program is one that a test runs."""
    of_readme = any(program.text in text for text in test_readme.PROGRAMS)
    return bool(program.is_doctest or program.title or of_readme or program.page == test_composition_page.PAGE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run(page: str) -> None:
    for command in commands(page):
        if not page_commands.has_placeholders(command) and command.text not in page_commands.ELSEWHERE:
            assert can_start(command, page), f"{page}:{command.line}: {command.text} is run by no test"


@pytest.mark.parametrize("page", PAGES)
def test_every_program_is_run(page: str) -> None:
    for block in blocks(page):
        if block.is_program:
            assert is_run(block), f"{page}:{block.line}: a program that no test runs\n{block.text}"


@pytest.mark.parametrize("page", PAGES)
def test_forms_of_commands_are_accepted(page: str) -> None:
    for command in filter(page_commands.has_placeholders, commands(page)):
        program, *words = shlex.split(command.text)
        filled = [page_commands.PLACEHOLDERS.get(word, word) for word in words if word != "..."]
        assert program == "fxshard"
        if "..." in words:
            filled[1:1] = ["module:function", "--input", "1x3x8x16", "--world-size", "2"]
        make_parser().parse_args(filled)


def test_a_list_has_no_command_that_is_on_no_page() -> None:
    typed = {command.text for page in PAGES for command in commands(page)}
    assert {command for table in LISTED for command in table} <= typed


def test_readme_s_programs_are_run_by_name() -> None:
    for program in test_readme.PROGRAMS:
        assert sum(mark in program for mark in test_readme.MARKS) == 1, program


def test_the_coverage_page_says_what_the_tool_writes() -> None:
    assert ABOUT in (ROOT / "docs/coverage.md").read_text(encoding="utf-8")


def test_links_of_readme_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page} links {target}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```console\n$ fxshard plan m --x\nsays\n```\n", ["fxshard plan m --x"]),
        ("```\n$ python a.py  # comment\n```\n", ["python a.py"]),
        ("```\nfxshard doctor\n  of figures\n```\n", ["fxshard doctor"]),
        ("Run\n\n    pip install x && pytest\n\nnow.\n", ["pip install x", "pytest"]),
        (
            "With `fxshard doctor` or `fxshard plan\nm --y`, not `fxshard plan`.\n",
            ["fxshard doctor", "fxshard plan m --y"],
        ),
        ("```python\npython = 1\n```\n", []),
    ],
)
def test_commands_are_found(text: str, found: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    page = tmp_path_factory.mktemp("pages") / "page.md"
    page.write_text(text)
    assert [command.text for command in commands(str(page))] == found


@pytest.mark.parametrize(
    ("page", "printed", "same"),
    [("a ...\nb 1.0e-16", "a x y\n b   3e-9 ", True), ("a 2", "a 3", False), ("a", "a b", False)],
)
def test_what_a_page_says_is_compared_with_what_is_printed(page: str, printed: str, same: bool) -> None:
    assert says(page, printed) is same

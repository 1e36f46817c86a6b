"""README and the pages of ``docs`` do what they say: their files, commands and doctests run, from top to bottom.

For every change in this process and on the ranks of the pool, the large ones smaller; at night as a reader types them.
What is run otherwise stands in ``tests/page_commands.py``; ``tests/unit/test_pages.py`` fails for what stands nowhere.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch.distributed import device_mesh

from fxshard import cli, demo, verification
from fxshard.rules import registered
from fxshard.workers import mesh
from tests import pages
from tests.page_commands import AT_NIGHT, FILES, SMALLER, is_followed
from tests.ranks.torchrun import said_by_each_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fxshard.workers import RankPool

PATIENCE_S = 600


class Borrowed:
    """Stands for a pool of a command's own: the first ranks of the tests' pool."""

    def __init__(self, pool: RankPool, ranks: int, **_: Any) -> None:
        self.pool, self.ranks = pool, ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(fn, *args, ranks=self.ranks)


def script_on_rank(rank: int, script: str, ranks: int) -> str:
    """Run a script that torchrun would start on so many ranks; return what it prints."""
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(ranks))
        patch.setattr(device_mesh, "init_device_mesh", lambda _, shape, **__: mesh(tuple(shape)))  # of the pool's ranks
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.chdir(Path(script).parent):
            runpy.run_path(script, run_name="__main__")
    return said.getvalue()


class Here:
    """Runs commands in this process, and on the ranks of the tests' pool."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def run(self, command: str) -> str:
        """Run a command and return what it prints."""
        program, *words = shlex.split(SMALLER.get(command, command))
        torch.compiler.reset()
        if program == "torchrun":
            ranks, script = int(words[1]), Path(words[-1]).resolve()
            return "".join(self.pool.run(script_on_rank, str(script), ranks, ranks=ranks))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if program == "fxshard":
                assert cli.main(words) == 0
            else:
                runpy.run_path(words[0], run_name="__main__")
        return said.getvalue()


class Outside:
    """Runs commands as a reader does."""

    def run(self, command: str) -> str:
        """Run a command and return what it prints."""
        program, *words = shlex.split(command)
        if program == "torchrun":
            return "".join("\n".join(lines) for lines in said_by_each_rank(Path(words[-1]), int(words[1]), Path.cwd()))
        started = ["-m", "fxshard", *words] if program == "fxshard" else words
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "100"}
        ended = subprocess.run(
            [sys.executable, *started],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


def follow(page: str, shell: Here | Outside) -> None:
    """Do what a page says, in the current folder."""
    for name, text in FILES.get(page, {}).items():
        Path(name).write_text(text)
    names: dict[str, Any] = {}
    for block in pages.blocks(page):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.is_doctest and isinstance(shell, Here):
            check_doctest(block, names)
        for command in filter(is_followed, block.commands):
            if command.text in AT_NIGHT and isinstance(shell, Here):
                continue
            said = shell.run(command.text)
            as_written = isinstance(shell, Outside) or command.text not in SMALLER
            assert not command.said or not as_written or pages.says(command.said, said), (
                f"{page}:{command.line}: {command.text}\nsays\n{command.said}\nand printed\n{said}"
            )


class WithoutLines(doctest.OutputChecker):
    """Compares without the lines of source that a plan explains, which depend on how it was typed."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub(r"^    at .*\n", "", got, flags=re.MULTILINE), optionflags)


def check_doctest(block: pages.Block, names: dict[str, Any]) -> None:
    """Run a block with prompts; what it defines is there in the page's next ones."""
    torch.compiler.reset()
    name = f"{block.page}:{block.line}"
    examples = doctest.DocTestParser().get_examples(block.text, name)
    test = doctest.DocTest(examples, names, name, block.page, block.line, block.text)
    test.globs = names  # not a copy
    runner = doctest.DocTestRunner(WithoutLines(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said = io.StringIO()
    runner.run(test, out=said.write, clear_globs=False)
    assert not runner.failures, said.getvalue()


def followed_pages() -> list[str]:
    return [
        p
        for p in pages.PAGES
        if any(b.is_doctest or b.title or any(map(is_followed, b.commands)) for b in pages.blocks(p))
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to follow a page in; what was imported from it, and its rules, are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if p)])
    rules = dict(registered())
    yield tmp_path
    for op in registered().keys() - rules.keys():
        del registered()[op]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", followed_pages())
def test_a_page_does_what_it_says(page: str, pool: RankPool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verification, demo):
        monkeypatch.setattr(module, "RankPool", lambda ranks, **_: Borrowed(pool, ranks))
    follow(page, Here(pool))


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("page", [p for p in pages.PAGES if any(map(is_followed, pages.commands(p)))])
def test_a_page_does_what_it_says_outside(page: str, folder: Path) -> None:
    follow(page, Outside())

"""``fxshard completion``: the scripts complete in real shells what the parser takes."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from fxshard.cli import COMMANDS, main, make_parser
from fxshard.completion_command import SHELLS, script
from fxshard.optional import MissingPackageError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {command.name for command in COMMANDS}
BASH = """\
{script}
[[ $(complete -p fxshard) =~ -F\\ ([^ ]+) ]]
COMP_WORDS=({words}) COMP_CWORD={last}
"${{BASH_REMATCH[1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    pytest.importorskip("shtab")
    return {shell: script(make_parser(), shell) for shell in SHELLS}


def said_by(shell: str, program: str, *options: str, folder: Path | None = None) -> str:
    """Return what a shell that reads no files of its user's says to a program."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    ended = subprocess.run(
        [found, *options], input=program, cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", NAMES),
        ("ver", {"verify"}),
        ("plan --in", {"--input", "--inner-backend"}),
        ("plan m:f --input 1x3x8x8 --me", {"--mesh", "--memory", "--memory-limit-gib"}),
        ("demo --split ", {"W", "H", "HW"}),
        ("verify m:f --dtype float64 float3", {"float32"}),
        ("draw m:f --stage l", {"local"}),
        ("plan m:f --save mine", {"mine.json", "mine.html"}),
        ("verify m:f --json mine.j", {"mine.json"}),
        ("completion ", set(SHELLS)),
    ],
)
def test_bash_completes(scripts: dict[str, str], tmp_path: Path, typed: str, offered: set[str]) -> None:
    for name in ("mine.json", "mine.html", "other.json"):
        (tmp_path / name).touch()
    words = f"fxshard {typed}".split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    program = BASH.format(script=scripts["bash"], words=listed, last=len(words) - 1)
    assert set(said_by("bash", program, "--norc", "--noprofile", folder=tmp_path).split()) == offered


def test_zsh_reads_its_script(scripts: dict[str, str]) -> None:
    said_by("zsh", scripts["zsh"], "-f", "-n")
    assert all(f"_shtab_fxshard_{name}_options" in scripts["zsh"] for name in NAMES)


def test_tcsh_reads_its_script(scripts: dict[str, str]) -> None:
    rules = said_by("tcsh", scripts["tcsh"] + "\ncomplete fxshard\n", "-f")
    assert f"p/1/({' '.join(command.name for command in COMMANDS)})/" in rules
    assert "'n/--stage/(global local)/'" in rules


def test_the_command_prints_a_script(scripts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"] + "\n"


def test_without_shtab_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxshard.optional.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError):
        script(make_parser(), "bash")
    assert main(["completion", "zsh"]) == 2
    assert "pip install shtab" in capsys.readouterr().err

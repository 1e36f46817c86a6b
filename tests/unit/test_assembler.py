"""The assembler of kernels: one that drops what is added is found out, and run behind what takes pairs apart."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fxshard import assembler, doctor
from fxshard.assembler import BEHIND, PROBE, REAL, Choice, Slot, choice, keeps_additions

HOPPER = (9, 0)
SLOT = Slot("TRITON_PTXAS_PATH", "ptxas")


def installed() -> list[Path]:
    """Return the assemblers that came with torch and Triton."""
    triton = find_spec("triton")
    places = [Path(torch.__file__).parent / "bin" / "ptxas"]
    if triton is not None and triton.origin:
        folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        places += [folder / "ptxas", folder / "ptxas-blackwell"]
    return [place for place in places if os.access(place, os.X_OK)]


def script(path: Path, line: str) -> Path:
    """Return a program of one line that stands for an assembler; its fourth argument is what it has to write."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return script(tmp_path / "sound", 'cp "$2" "$4"')


@pytest.fixture
def unsound(tmp_path: Path) -> Path:
    return script(tmp_path / "unsound", 'if grep -q s16x2 "$2"; then echo code > "$4"; else cp "$2" "$4"; fi')


@pytest.mark.parametrize("ptxas", installed(), ids=lambda path: f"{path.parent.parent.name}-{path.name}")
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_every_assembler_keeps_additions_behind_the_script(ptxas: Path, arch: str) -> None:
    assert keeps_additions(BEHIND, arch, real=ptxas)


@pytest.mark.skipif(not installed(), reason="no assembler came with torch")
def test_what_the_script_takes_apart_assembles(tmp_path: Path) -> None:
    source = tmp_path / "kernel.ptx"
    text = (PROBE % 3).replace(".reg .b16", ".reg .pred %p<2>;\n    .reg .b16")
    text = text.replace("add.s16x2", "setp.lt.u32 %p1, %r1, 7;\n    @!%p1 add.u16x2")
    text = text.replace("mov.b32 {%h3", "add.s16x2 %r4, %r4, 65537;\n    mov.b32 {%h3")
    source.write_text(text)
    environ = {**os.environ, REAL: str(installed()[0])}
    command = [str(BEHIND), "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    assert "16x2" not in source.read_text()
    assert "@!%p1 mov.b32 %r4, {a, b}; }" in source.read_text()
    assert "mov.b32 y, 65537;" in source.read_text()


@pytest.mark.skipif(not installed(), reason="no assembler came with torch")
def test_the_script_has_a_version_of_its_own() -> None:
    """Triton reads the release in it, and keeps what it has compiled by the whole of it."""
    real = installed()[0]
    plain = subprocess.run([real, "--version"], capture_output=True, text=True, check=True).stdout
    said = subprocess.run(
        [BEHIND, "--version"], env={**os.environ, REAL: str(real)}, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(plain)
    assert said != plain
    release = re.compile(r"release (\d+\.\d+)")
    assert release.findall(said) == release.findall(plain)


def test_a_sound_one_is_left_alone(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOT.variable, str(sound))
    assert choice(HOPPER) == Choice(SLOT, sound, sound)
    assert "keeps" in str(choice(HOPPER))


def test_an_unsound_one_is_run_behind_the_script(unsound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOT.variable, str(unsound))
    found = choice(HOPPER)
    assert found == Choice(SLOT, unsound, BEHIND)
    assert "193183" in str(found)
    assert choice((8, 0)).found is None, "there are no pairs before Hopper"


def test_one_that_nothing_helps_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOT.variable, str(script(tmp_path / "deaf", 'echo code > "$4"')))
    assert choice(HOPPER).used is None
    assert "set TRITON_PTXAS_PATH to the ptxas of CUDA 13.3" in str(choice(HOPPER))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    assert [found.verdict for found in doctor.assemblers()] == ["fails"]


def test_this_process_and_those_it_starts_use_the_script(unsound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOT.variable, str(unsound))
    monkeypatch.setenv(REAL, "")
    assembler._use.cache_clear()
    try:
        tag = assembler._use(HOPPER)
        assert tag
        assert os.environ[SLOT.variable] == str(BEHIND)
        assert os.environ[REAL] == str(unsound)
        assembler._use.cache_clear()
        assert assembler._use(HOPPER) == tag, "a process that was started with it"
        assert os.environ[REAL] == str(unsound)
    finally:
        assembler._use.cache_clear()


def test_cpus_need_no_assembler() -> None:
    assert assembler.use_sound_assembler(torch.device("cpu")) == ""

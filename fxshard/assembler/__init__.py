"""The assembler of kernels for GPUs: one that keeps what is added.

NVIDIA's ptxas of CUDA 12.8, 12.9 and 13.0 drops the number that is added to a pair of 16-bit integers of which only
the lower is used; that of 13.3 does not.  Triton assembles with one of the former on Hopper GPUs, up to 3.8 at least,
and LLVM pairs integers where Inductor's index arithmetic is small::

    column % 3 + 3      PTX   add.s16x2 %r6, %r4, 3      SASS   VIADD.16x2 R4, R4, 0x0

A halo's window is read at such an index, so a ConvNeXt on 3 ranks had gradients that were wrong by a tenth, on an H200
with torch 2.11.  Known as https://github.com/pytorch/pytorch/issues/193183 and
https://github.com/triton-lang/triton/issues/11581.

Here an assembler is asked, by what it makes of two numbers, whether it is one of those; then it is used behind
``ptxas.sh``, which takes the pairs apart.  (Another assembler could make what the GPU's driver does not load.)
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from fxshard._torch import restart_compile_workers

log = logging.getLogger("fxshard")

PAIRS_SINCE = (9, 0)
"""The compute capability from which on there is an instruction that adds pairs."""
BEHIND = Path(__file__).with_name("ptxas.sh")
REAL = "FXSHARD_PTXAS"
"""The environment's name of the assembler that :data:`BEHIND` runs."""
PROBE = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 out)
{
    .reg .b16 %%h<5>;
    .reg .b32 %%r<6>;
    .reg .b64 %%d<2>;
    ld.param.u64 %%d1, [out];
    mov.u32 %%r1, %%tid.x;
    cvt.u16.u32 %%h1, %%r1;
    mov.b32 %%r2, {%%h1, %%h2};
    mov.b32 %%r3, %d;
    add.s16x2 %%r4, %%r2, %%r3;
    mov.b32 {%%h3, %%h4}, %%r4;
    cvt.u32.u16 %%r5, %%h3;
    st.global.u32 [%%d1], %%r5;
    ret;
}
"""
"""A kernel that stores its thread's number, to which something is added; with its place in a pair."""


class Slot(NamedTuple):
    """Where Triton looks for an assembler.

    Args:
        variable: Of the environment, with its path.
        name: Of the one in Triton's own folder.
    """

    variable: str
    name: str


@dataclass(frozen=True)
class Choice:
    """Which assembler Triton is to use.

    Args:
        slot: Where Triton looks for it.
        found: The one that it would use; None where there is none to be asked.
        used: What keeps what is added: it, or :data:`BEHIND` before it; None where neither does.
    """

    slot: Slot
    found: Path | None
    used: Path | None

    def __str__(self) -> str:
        if self.found is None:
            return "no assembler was found"
        if self.used == self.found:
            return f"{self.found} keeps what is added to pairs of integers"
        text = f"{self.found} drops what is added to pairs of integers (pytorch issue 193183): kernels of Inductor "
        text += "would read at wrong places; "
        if self.used is None:
            return text + f"set {self.slot.variable} to the ptxas of CUDA 13.3 or later"
        return text + f"fxshard has it run behind {self.used}, which takes the pairs apart"


def use_sound_assembler(device: torch.device) -> str:
    """Have Triton assemble with what keeps what is added, in this process and in those that compile for it.

    Args:
        device: That kernels are for; only CUDA devices need one.

    Returns:
        What has to be in the key of kernels that are cached: another text for another assembler.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return ""
    return _use(torch.cuda.get_device_capability(device))


@functools.cache  # the log has one line of it, and what is found stays there
def _use(capability: tuple[int, int]) -> str:
    found = choice(capability)
    if found.used is None and found.found is not None:
        log.warning("%s", found)
    if found.used != BEHIND:
        return ""
    if found.found != BEHIND:  # where it is, a process that started this one has done what follows
        log.info("%s", found)
        os.environ[REAL] = str(found.found)
        os.environ[found.slot.variable] = str(BEHIND)
        restart_compile_workers()
    return "pairs taken apart"


def choice(capability: tuple[int, int]) -> Choice:
    """Return which assembler Triton is to use on GPUs of a compute capability."""
    slot = Slot("TRITON_PTXAS_PATH", "ptxas")
    if capability >= (10, 0):
        slot = Slot("TRITON_PTXAS_BLACKWELL_PATH", "ptxas-blackwell")
    found = _triton_s(slot)
    if capability < PAIRS_SINCE or found is None:
        return Choice(slot, None, None)
    arch = f"sm_{capability[0]}{capability[1]}"
    if keeps_additions(found, arch):
        return Choice(slot, found, found)
    return Choice(slot, found, BEHIND if keeps_additions(BEHIND, arch, real=found) else None)


def _triton_s(slot: Slot) -> Path | None:
    """Return the assembler that Triton uses when Inductor asks it to compile; None where there is none."""
    named = os.environ.get(slot.variable)
    places = [Path(named)] if named else []
    if slot.name == "ptxas":
        places.append(Path(torch.__file__).parent / "bin" / "ptxas")  # Inductor sets the variable to it
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / slot.name)
    return next((place for place in places if os.access(place, os.X_OK)), None)


def keeps_additions(ptxas: Path, arch: str, *, real: Path | None = None) -> bool:
    """Return whether an assembler makes different code where different numbers are added.

    Args:
        ptxas: The assembler.
        arch: What it assembles for, such as ``"sm_90"``.
        real: The assembler that :data:`BEHIND` is to run.
    """
    with tempfile.TemporaryDirectory(prefix="fxshard-probe-") as folder:
        made = []
        for number in (3, 5):
            source = Path(folder) / "probe.ptx"
            source.write_text(PROBE % number)
            code = source.with_suffix(".cubin")
            environ = {**os.environ, **({} if real is None else {REAL: str(real)})}
            command = [str(ptxas), f"--gpu-name={arch}", str(source), "-o", str(code)]
            try:
                subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                log.debug("%s does not assemble for %s: %s", ptxas, arch, error)
                return False
            made.append(code.read_bytes())
    return made[0] != made[1]

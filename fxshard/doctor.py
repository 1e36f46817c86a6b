"""Does this machine have what fxshard needs, and do two ranks on it agree with one device?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

import fxshard
from fxshard.assembler import choice
from fxshard.errors import FxShardError
from fxshard.optional import pip_command
from fxshard.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRIED = ("2.11", "2.14")
"""The minor versions of torch that the tests were run on."""
OLDEST_PYTHON = (3, 11)
OPTIONAL = {
    "timm": "models named timm:...",
    "torchvision": "models named torchvision:...",
    "skimage": "the demo's photographs (scikit-image)",
    "rich": "the demo's progress bar",
    "shtab": "fxshard completion",
}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        name: Of what was looked at.
        verdict: ``"ok"``, ``"warning"`` where some uses miss it, ``"fails"`` where nothing works without it.
        text: What was found, and what to do.
    """

    name: str
    verdict: Literal["ok", "warning", "fails"]
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name:<18} {self.text}"


def versions() -> Iterator[Finding]:
    """Yield what Python, torch and fxshard are."""
    right = sys.version_info[:2] >= OLDEST_PYTHON
    yield Finding("python", "ok" if right else "fails", f"{platform.python_version()}, {platform.system()}")
    minor = ".".join(torch.__version__.split(".")[:2])
    oldest = tuple(map(int, TRIED[0].split(".")))
    if tuple(map(int, minor.split("."))) < oldest:
        yield Finding("torch", "fails", f"{torch.__version__}; fxshard needs {TRIED[0]} or later")
    else:
        tried = minor in TRIED
        more = "" if tried else f"; fxshard's tests ran on {' and '.join(TRIED)}: fxshard verify tells whether it works"
        yield Finding("torch", "ok" if tried else "warning", torch.__version__ + more)
    yield Finding("fxshard", "ok", f"{fxshard.__version__} in {Path(fxshard.__file__).parent}")


def entry_point() -> Iterator[Finding]:
    """Yield whether ``torch.compile(model, backend="fxshard")`` finds the backend without an import."""
    found = [e.value for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "fxshard"]
    if found:
        yield Finding("backend", "ok", f'torch.compile(model, backend="fxshard") is {found[0]}')
    else:
        remedy = "pip install fxshard, or pip install -e . in a checkout"
        yield Finding("backend", "warning", f'torch.compile(model, backend="fxshard") does not find it: {remedy}')


def communication() -> Iterator[Finding]:
    """Yield which libraries ranks can talk by."""
    if not dist.is_available():
        yield Finding("torch.distributed", "fails", "this torch was built without it")
        return
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield Finding("gloo", "ok" if gloo else "warning", "for ranks on CPUs" if gloo else "no ranks on CPUs")
    yield Finding("nccl", "ok" if nccl else "warning", _nccl_version() if nccl else "no ranks on GPUs")
    set_here = {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG") if k in os.environ}
    if set_here:
        yield Finding("environment", "ok", ", ".join(f"{k}={v}" for k, v in set_here.items()))


def _nccl_version() -> str:
    return f"{'.'.join(map(str, torch.cuda.nccl.version()))}, for ranks on GPUs"


def gpus() -> Iterator[Finding]:
    """Yield the GPUs, and whether they reach each other's memory."""
    if not torch.cuda.is_available():
        yield Finding("gpus", "warning", "none that torch can use: plans and verification work, training is slow")
        return
    count = torch.cuda.device_count()
    for i in range(count):
        about = torch.cuda.get_device_properties(i)
        yield Finding(f"gpu {i}", "ok", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    apart = [f"{i}-{j}" for i in range(count) for j in range(i) if not torch.cuda.can_device_access_peer(i, j)]
    if apart:
        yield Finding("peer access", "warning", f"not between GPUs {', '.join(apart)}: halos go through the host")
    elif count > 1:
        yield Finding("peer access", "ok", "between all GPUs")


def compilers() -> Iterator[Finding]:
    """Yield what Inductor compiles with."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    missing = 'inner_backend="inductor" does not work on CPUs; use "aot_eager"'
    yield Finding("c++ compiler", "ok" if compiler else "warning", compiler or missing)
    if torch.cuda.is_available():
        found = find_spec("triton") is not None
        yield Finding("triton", "ok" if found else "warning", "found" if found else "no Inductor on GPUs")
        yield from assemblers()


def assemblers() -> Iterator[Finding]:
    """Yield whether what assembles for the GPUs keeps what is added."""
    for capability in sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}):
        found = choice(capability)
        if found.used is not None:
            yield Finding("assembler", "ok" if found.used == found.found else "warning", str(found))
        elif found.found is not None:
            yield Finding("assembler", "fails", str(found))


def packages() -> Iterator[Finding]:
    """Yield the optional packages."""
    for name, use in OPTIONAL.items():
        found = find_spec(name) is not None
        yield Finding(name, "ok" if found else "warning", use if found else f"missing: {use}; {pip_command(name)}")


def ranks() -> Iterator[Finding]:
    """Yield whether two ranks on this machine compute what one device does."""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.device_count() else "cpu"
    start = time.monotonic()
    try:
        found = verify(torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 8, 16), world_size=2, device=device)
    except FxShardError as error:
        yield Finding("two ranks", "fails", str(error).splitlines()[0])
        return
    text = f"a convolution split over two ranks ({device}), {time.monotonic() - start:.0f} s: "
    text += "as on one device" if found.exact else "NOT as on one device; fxshard verify --bisect says where"
    yield Finding("two ranks", "ok" if found.exact else "fails", text)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (versions, entry_point, communication, gpus, compilers, packages)

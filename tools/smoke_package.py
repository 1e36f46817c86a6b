"""Builds the package, installs it where the checkout is not, and tries it there.

    python tools/smoke_package.py               # wheel and sdist, and a user's script under mypy --strict
    python tools/smoke_package.py --no-types    # without the last, which takes half a minute

Nothing is downloaded: setuptools, torch and the rest are those of the interpreter that runs this::

    tracked files --build--> sdist --build--> wheel
                               |                |
                             install          install               each into an environment of its own
                               |                |
                             files, licences, entry points          the same in both
                                                |
                                              command line, backend, types

The files are those that git knows, so commit first, or at least ``git add``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
LICENCES = ("LICENSE", "fxshard/viewer/dagre.LICENSE.txt")
USER_SCRIPT = ROOT / "tests" / "user_script.py"
ENTRY_POINTS = {("console_scripts", "fxshard"), ("torch_dynamo_backends", "fxshard")}

NET = """\
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU())
"""
BACKEND = """\
import torch
from net_of_mine import net
torch.manual_seed(0)
model, image = net(), torch.randn(1, 3, 8, 32)
found = torch.compile(model, backend="fxshard", options={"inner_backend": "eager"})(image)
torch.testing.assert_close(found, model(image))
import fxshard, fxshard.passes
print(fxshard.__file__, fxshard.passes.__file__, sep="\\n")
"""
DISTRIBUTION = """\
from importlib.metadata import distribution
import fxshard
found = distribution("fxshard")
assert found.version == fxshard.__version__, (found.version, fxshard.__version__)
for entry in found.entry_points:
    print(entry.group, entry.name)
"""


class PackageError(Exception):
    """The package is not what it should be."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of the interpreter that runs this.

    Args:
        folder: Where it is.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def make(self) -> None:
        """Create it."""
        venv.create(self.folder, symlinks=True)
        # of a folder that a .pth file names the .pth files are not read: editable installations stay outside
        outside = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.packages / "outside.pth").write_text("\n".join(outside) + "\n")

    def install(self, artifact: Path) -> None:
        """Install a wheel or a sdist, without what it depends on."""
        offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
        said_by([sys.executable, "-m", "pip", "--python", self.python, "install", *offline, artifact], self.folder)


def said_by(command: Sequence[str | Path], folder: Path) -> str:
    """Return the standard output of a command that must succeed, run in ``folder`` and away from the checkout.

    Raises:
        PackageError: It failed.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ended = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    if ended.returncode:
        msg = f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        raise PackageError(msg)
    return ended.stdout


def tracked() -> list[str]:
    """Return the files that git knows, links as links."""
    return said_by(["git", "ls-files", "-z"], ROOT).rstrip("\0").split("\0")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, of the tracked files alone: what lies around in a checkout stays out.

    Returns:
        The wheel and the sdist.
    """
    source, built = folder / "source", folder / "dist"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    said_by([sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source], folder)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    return wheel, sdist


def expected_files() -> dict[str, bytes]:
    """Return what site-packages/fxshard has to hold: the package, and in place of the link the passes themselves."""
    names = [name for name in tracked() if name.startswith(("fxshard/", "passes/")) and not (ROOT / name).is_symlink()]
    return {(name if name.startswith("fxshard/") else f"fxshard/{name}"): (ROOT / name).read_bytes() for name in names}


def check_files(packages: Path) -> None:
    """Compare what was installed with the checkout.

    Raises:
        PackageError: Files are missing, are too many, are links or have other contents; licences are missing;
            something else was installed beside the package.
    """
    there = [p for p in (packages / "fxshard").rglob("*") if "__pycache__" not in p.parts and not p.is_dir()]
    found = {p.relative_to(packages).as_posix(): p.read_bytes() for p in there if not p.is_symlink()}
    if found != (expected := expected_files()):
        differs = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        msg = f"the package's files are not those of the checkout: {', '.join(differs)}"
        raise PackageError(msg)
    (metadata,) = packages.glob("fxshard-*.dist-info")
    beside = {p.name for p in packages.iterdir()} - {"fxshard", metadata.name, "outside.pth"}
    missing = [name for name in LICENCES if not (metadata / "licenses" / name).is_file()]
    if beside or missing:
        msg = f"installed beside fxshard: {sorted(beside) or 'nothing'}; licences missing: {missing or 'none'}"
        raise PackageError(msg)


def check_installed(environment: Environment) -> None:
    """Look at what was installed; starts no torch.

    Raises:
        PackageError: Its files or entry points are not as they should be.
    """
    check_files(environment.packages)
    said = said_by([environment.python, "-c", DISTRIBUTION], environment.folder)
    if (entries := {tuple(line.split()) for line in said.splitlines()}) != ENTRY_POINTS:
        msg = f"entry points are {sorted(entries)}, not {sorted(ENTRY_POINTS)}"
        raise PackageError(msg)
    said_by([environment.folder / "bin" / "fxshard", "--version"], environment.folder)


def check_use(environment: Environment) -> None:
    """Plan a model on the command line, and run the backend.

    Raises:
        PackageError: One of them fails, or is not what was installed.
    """
    folder, python = environment.folder, environment.python
    (folder / "net_of_mine.py").write_text(NET)
    asked = ["plan", "net_of_mine:net", "--input", "1x3x8x32", "--world-size", "2", "--save", "plan.html"]
    said_by([python, "-m", "fxshard", *asked], folder)
    page = (folder / "plan.html").read_text().rstrip()
    if not page.endswith("</html>"):
        msg = f"the page that fxshard plan wrote ends with {page[-200:]!r}, not with </html>"
        raise PackageError(msg)
    origins = said_by([python, "-c", BACKEND], folder).splitlines()
    if not all(Path(origin).is_relative_to(environment.packages) for origin in origins):
        msg = f"fxshard was imported from {origins}, not from {environment.packages}"
        raise PackageError(msg)


def check_types(environment: Environment) -> None:
    """Check a user's script as a user does, who has the package installed and knows no settings of this project.

    Raises:
        PackageError: The type checker complains.
    """
    script = shutil.copy(USER_SCRIPT, environment.folder)
    strictly = ["--strict", "--untyped-calls-exclude", "torch"]  # Tensor.backward has no types
    how = ["--python-executable", str(environment.python), "--config-file", os.devnull, "--cache-dir", ".mypy_cache"]
    said_by([sys.executable, "-m", "mypy", *strictly, *how, script], environment.folder)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long something took."""
    start = time.monotonic()
    yield
    print(f"{what:<44}{time.monotonic() - start:6.1f} s", flush=True)


def check(folder: Path, *, types: bool) -> None:
    """Build, install and try; say how long each took.

    Raises:
        PackageError: Something is not as it should be.
    """
    with timed("build"):
        wheel, sdist = build(folder)
    of_wheel, of_sdist = Environment(folder / "of-wheel"), Environment(folder / "of-sdist")
    for artifact, environment in ((wheel, of_wheel), (sdist, of_sdist)):
        with timed(f"install {artifact.name}"):
            environment.make()
            environment.install(artifact)
            check_installed(environment)
    with timed("command line and backend"):  # of the wheel: the sdist's files are the same
        check_use(of_wheel)
    if types:
        with timed("types"):
            check_types(of_wheel)


def main() -> int:
    """Check the package; return the exit status."""
    parser = argparse.ArgumentParser(description="Builds the package, installs it elsewhere and tries it.")
    parser.add_argument("--no-types", action="store_true", help="without mypy, which takes half a minute")
    types = not parser.parse_args().no_types
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(folder), types=types)
        except PackageError as error:
            print(f"the package is not what it should be: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Optional packages: imported by the command that needs them, with a remedy where they are missing."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from fxshard.errors import FxShardError

DISTRIBUTIONS = {"skimage": "scikit-image"}
"""What pip calls a package, where that is not its name."""


class MissingPackageError(FxShardError):
    """An optional package is not installed."""


def require(*names: str) -> None:
    """Raise where one of the packages is missing; imports none of them.

    Args:
        names: Top-level packages, as they are imported.

    Raises:
        MissingPackageError: One line, with the pip command for all that are missing.

    Example:
        >>> require("torch")
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        what = "a package that is" if len(missing) == 1 else "packages that are"
        msg = f"this needs {what} not installed; run: {pip_command(*missing)}"
        raise MissingPackageError(msg)


def pip_command(*names: str) -> str:
    """Return the command that installs packages.

    Args:
        names: As they are imported.

    Example:
        >>> pip_command("skimage", "timm")
        'pip install scikit-image timm'
    """
    return f"pip install {' '.join(DISTRIBUTIONS.get(name, name) for name in names)}"


def load(name: str) -> Any:
    """Return the optional module ``name``.

    Args:
        name: Its dotted name, such as ``"torchvision.models"``.

    Raises:
        MissingPackageError: Its package is not installed.
    """
    require(name.partition(".")[0])
    return importlib.import_module(name)

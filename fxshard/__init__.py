"""fxshard: train and run unmodified PyTorch models with the image or volume split over GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxshard.api import transform
    from fxshard.dry_run import Plan, plan
    from fxshard.errors import FxShardError
    from fxshard.verification import Verification, verify

__version__ = "0.1.0"
__all__ = ["FxShardError", "Plan", "Verification", "plan", "transform", "verify"]

_MODULES = {
    "FxShardError": "errors",
    "Plan": "dry_run",
    "Verification": "verification",
    "plan": "dry_run",
    "transform": "api",
    "verify": "verification",
}
"""Where the public names are; imported when they are used, so that the command line's help needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Models by name: ``timm:convnext_atto``, ``torchvision:resnet18``, ``some.module:factory``.

A name without a colon is timm's.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxshard.errors import FxShardError
from fxshard.near_names import near
from fxshard.optional import load

if TYPE_CHECKING:
    from collections.abc import Callable


class UnknownModelError(FxShardError):
    """No model has this name."""


def split_name(name: str) -> tuple[str, str]:
    """Return the library or module, and the model's name there.

    Example:
        >>> split_name("convnext_atto"), split_name("torchvision:resnet18")
        (('timm', 'convnext_atto'), ('torchvision', 'resnet18'))
    """
    library, colon, model = name.rpartition(":")
    return (library if colon else "timm"), model


def find_model(name: str) -> None:
    """Raise where there is no model of this name; builds none.

    Raises:
        UnknownModelError: There is no such model.
        MissingPackageError: Its library is not installed; with the pip command.
    """
    library, model = split_name(name)
    if library == "timm":
        _timm_with(model)
    elif library == "torchvision":
        _torchvision_factory(model)
    else:
        _factory(library, model)


def build_named(name: str, *, num_classes: int, drop_path_rate: float = 0.0, insist: bool = False) -> nn.Module:
    """Return a new, untrained model; where the name is that of a model that exists, that one.

    Args:
        name: ``timm:NAME``, ``torchvision:NAME``, ``module:factory`` or timm's ``NAME``.  A factory is called with
            those of the keyword arguments below that it names.
        num_classes: How many logits.
        drop_path_rate: How often a residual branch is dropped in training; for models that have it.
        insist: Whether a factory of a module is given them although it has defaults of its own.

    Raises:
        UnknownModelError: There is no such model.
        MissingPackageError: Its library is not installed.
    """
    library, model = split_name(name)
    wanted = {"num_classes": num_classes, "drop_path_rate": drop_path_rate}
    if library == "timm":
        return _timm_model(model, num_classes, drop_path_rate)
    factory = _torchvision_factory(model) if library == "torchvision" else _factory(library, model)
    if isinstance(factory, nn.Module):
        return factory
    named = inspect.signature(factory).parameters
    if library == "torchvision":  # its models take num_classes through **kwargs
        given = {k: v for k, v in wanted.items() if k in named or k == "num_classes"}
    else:
        given = {
            k: v for k, v in wanted.items() if k in named and (insist or named[k].default is inspect.Parameter.empty)
        }
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        msg = f"{name!r} cannot be made without arguments: {error}; give a function without, module:function"
        raise UnknownModelError(msg) from error
    built = factory(**given)
    if not isinstance(built, nn.Module):
        msg = f"{name!r} returned {type(built).__name__}, not a torch.nn.Module"
        raise UnknownModelError(msg)
    return built


def _timm_model(model: str, num_classes: int, drop_path_rate: float) -> nn.Module:
    timm = _timm_with(model)
    try:
        built: nn.Module = timm.create_model(model, num_classes=num_classes, drop_path_rate=drop_path_rate)
    except TypeError:  # not every model has stochastic depth
        built = timm.create_model(model, num_classes=num_classes)
    return built


def _timm_with(model: str) -> Any:
    timm = load("timm")
    if not timm.is_model(model):
        names = timm.list_models()
        family = re.match("[a-z]*", model.lower())
        pattern = f"*{family.group()}*" if family and any(family.group() in name for name in names) else "*"
        msg = f"timm has no model {model!r}{near(model, names)}; timm.list_models({pattern!r}) lists names"
        module, dot, name = model.rpartition(".")
        msg += f"; a model of your own has a colon, {module}:{name}" if dot and name.isidentifier() else ""
        raise UnknownModelError(msg)
    return timm


def _torchvision_factory(model: str) -> Callable[..., object]:
    models = load("torchvision.models")
    names = models.list_models(module=models)
    if model not in names:
        like = near(model, names)
        msg = f"torchvision has no classification model {model!r}{like}; torchvision.models.list_models() lists names"
        raise UnknownModelError(msg)
    factory: Callable[..., object] = models.get_model_builder(model)
    return factory


def _factory(module: str, name: str) -> Callable[..., object]:
    try:
        factory: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        searched = f" in {Path.cwd()} or among the packages" if isinstance(error, ModuleNotFoundError) else ""
        msg = (
            f"there is no model {module}:{name}: {error}{searched}; give timm:NAME, torchvision:NAME or module:factory"
        )
        raise UnknownModelError(msg) from error
    return factory

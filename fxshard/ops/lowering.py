"""How a communication operator is defined: one function, its *lowering*, is everything it does.

A lowering is composed of functional aten operators and ``_c10d_functional`` collectives, each with its
``wait_tensor``.  It serves twice::

    define(name, schema)(lowering)
        eager     the kernel of torch.ops.fxshard.<name>
        compiled  LOWERINGS[torch.ops.fxshard.<name>.default], traced as a decomposition after autograd

so what was tested in eager mode is what a compiler sees.  A compiler moves an opaque operator freely, but knows
the collectives that are inside and keeps their order on every rank.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

# loads torch's functional collectives, which have no shape functions before
import fxshard._torch  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload
    from torch.library import CustomOpDef

Lowering: TypeAlias = "Callable[..., torch.Tensor]"

LOWERINGS: dict[OpOverload, Lowering] = {}
"""What each operator is made of; an entry serves as a decomposition."""
on_failure: dict[str, Callable[[BaseException], None]] = {}
"""By the names of process groups: called with what an operator raised in one; what it raises comes in its place."""


def define(name: str, schema: str) -> Callable[[Lowering], CustomOpDef]:
    """Return a decorator that makes a lowering the operator ``torch.ops.fxshard.<name>``.

    Args:
        name: The operator's name, without the namespace.
        schema: Its schema, without the name; the first argument is the tensor.

    Raises:
        ValueError: The operator is defined already.
    """

    def register(lowering: Lowering) -> CustomOpDef:
        operator = torch.library.custom_op(f"fxshard::{name}", _of_its_own(lowering), mutates_args=(), schema=schema)
        overload = getattr(torch.ops.fxshard, name).default
        if overload in LOWERINGS:
            msg = f"fxshard::{name} is defined twice"
            raise ValueError(msg)
        LOWERINGS[overload] = lowering
        return operator

    return register


def _of_its_own(lowering: Lowering) -> Lowering:
    """Return ``lowering`` with a result that is no view, which autograd would let nobody write to."""

    def run(*args: Any) -> torch.Tensor:
        with failures_told(str(args[-1])):
            made = lowering(*args)
        return torch.empty(0, dtype=made.dtype, device=made.device).set_(made)  # type: ignore[call-overload]

    return run


@contextmanager
def failures_told(group: str) -> Iterator[None]:
    """Tell :data:`on_failure` of what is raised in a group's communication, where no code around the graph sees it."""
    try:
        yield
    except BaseException as error:
        on_failure.get(group, _nothing)(error)
        raise


def _nothing(_: BaseException) -> None:
    pass


def differentiate(operator: CustomOpDef, backward: Lowering) -> None:
    """Give ``operator`` its gradient.

    Args:
        operator: What :func:`define` returned.
        backward: ``backward(grad, *args)`` with the operator's arguments after the tensor.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
        ctx.args = inputs[1:]

    def run(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (backward(grad, *ctx.args), *(None for _ in ctx.args))

    operator.register_autograd(run, setup_context=setup_context)


@cache
def lowering_hash() -> str:
    """Return a hash of the source of all lowerings and of fxshard's version.

    On-disk caches of compiled graphs key on an operator's name and not on what it is lowered to; without this
    hash in the key the old code runs on after a change.

    Returns:
        64 hexadecimal digits.
    """
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), folder.parent / "layout.py", folder.parent / "window.py"]
    digest = hashlib.sha256(_version().encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _version() -> str:
    try:
        return version("fxshard")
    except PackageNotFoundError:  # run from a checkout
        return ""

"""What happens to the functions that Dynamo compiles for ``torch.compile(backend="fxshard")``, beside their graphs.

Dynamo gives a backend graphs and nothing else.  What it leaves to Python runs on the whole image on every rank: the
result is exact, nothing is split, and nobody says so::

    a function has as many graphs as Dynamo keeps        an error on every rank
    it cannot be captured, nor gone on with in pieces    a warning, and other ranks that did capture it are told
    its compilation raises                               other ranks are told, and do not wait for this one
    it has sizes or numbers that change                  each is captured as it is: a plan is for one size
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fxshard import agreement
from fxshard._torch import Unsupported, UserError, breaks_so_far, static_shapes, watch_functions
from fxshard.errors import CaptureError
from fxshard.graph_breaks import location, reason_text, report_empty
from fxshard.mesh import news_level
from fxshard.options import mesh_of
from fxshard.provenance import is_users_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from fxshard._torch import CompiledFunction

log = logging.getLogger("fxshard")
LIMIT = "recompile_limit"
"""Of how many graphs Dynamo keeps of a function."""


def watch(backend: Callable[..., Any]) -> None:
    """Watch the functions that Dynamo compiles for ``backend`` from now on.

    Args:
        backend: What ``torch.compile`` finds by its name.
    """
    watch_functions(backend, _compiling)


def too_many_graphs(name: str) -> CaptureError:
    """Return the error for a model that was compiled so often that Dynamo keeps no more graphs.

    Args:
        name: The model's, or the function's.
    """
    msg = (
        f"{name} was compiled for as many sizes of its inputs, modes and sets of frozen parameters as Dynamo keeps "
        f"graphs; one more would run unsplit. Pad the images to a few sizes, or raise torch._dynamo.config.{LIMIT}"
    )
    return CaptureError(msg)


@contextmanager
def _compiling(function: CompiledFunction) -> Iterator[None]:
    name = _name(function.code)
    with static_shapes():
        if function.is_full():
            error = too_many_graphs(name)
            _tell(function, str(error), error)
            raise error
        before = len(breaks_so_far())
        try:
            yield
        except Exception as error:
            if isinstance(error, (Unsupported, UserError)) and not function.is_whole:
                _left_alone(function, name, error)
            else:
                _tell(function, f"{type(error).__name__}: {error}", error)
            raise
        report_empty(breaks_so_far()[before:], news_level(mesh_of(function.options)))


def _name(code: CodeType) -> str:
    if not is_users_file(code.co_filename):  # what calls a model of torch's classes
        return "the compiled model"
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _left_alone(function: CompiledFunction, name: str, error: Exception) -> None:
    at = location(getattr(error, "real_stack", None) or ())
    text = f"{name} is not captured, because of {at}: {reason_text(str(error))}"
    level = news_level(mesh_of(function.options))
    log.log(level, "%s; from now on it runs as it is, on the whole image on every rank: exact, and not split", text)
    _tell(function, f"{text}; it runs on this rank alone", error)


def _tell(function: CompiledFunction, message: str, error: Exception) -> None:
    """Tell other ranks that wait for this one to compile, or will."""
    agreement.announce_failure(mesh_of(function.options), message, error)

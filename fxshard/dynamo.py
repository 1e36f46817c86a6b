"""A module as Dynamo is given it, and what Dynamo and its backends raise as fxshard's own errors.

A transformed module that is met while a module is captured is one more part of that: its forward is the model's.
Whether that is so, Dynamo, which sees no context variables, reads from :data:`_CAPTURE`; code that runs reads it from
the call that is running::

                          captured by fxshard           captured by others        run
    is_capturing()        True                          False                     False; True where Dynamo is off and
                                                                                  the module to capture runs instead
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fxshard._torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
    get_torch_obj_rule_map,
    whole_graphs,
)
from fxshard.agreement import forget_told
from fxshard.batch_norms import cumulative_averages
from fxshard.errors import CaptureError, FxShardError, RankMismatchError
from fxshard.functions import too_many_graphs
from fxshard.graph_breaks import reason_text
from fxshard.provenance import users_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class _Capture:
    """Whether it is fxshard that captures."""

    active: bool = False


@dataclass
class Call:
    """A call of a compiled module.

    Args:
        graphs: How many compiled graphs have run.
    """

    graphs: int = 0


_SAID = re.compile(r"got \w+\((?P<text>.+)\)$", re.MULTILINE)
"""What an operator raised, in a message of Dynamo's."""
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
_CONTEXT = re.compile(r"Developer debug context: (?P<text>.*)$", re.MULTILINE)
"""What Dynamo met, in a message of its own."""
MOST_CONTEXT = 160
REMEDY = (
    "Change the line (torch.where in place of a branch on a value), keep it out of the module that is transformed, or "
    'use torch.compile(model, backend="fxshard"), which takes the pieces one by one. TORCHDYNAMO_VERBOSE=1 says more'
)
Announce: TypeAlias = "Callable[[str, BaseException], None]"
"""Tells the other ranks, in words, of an error."""
_CAPTURE = _Capture()
_call: ContextVar[Call | None] = ContextVar("call", default=None)


def _to_nobody(message: str, error: BaseException) -> None:
    pass


@contextmanager
def capturing(net: torch.nn.Module, announce: Announce = _to_nobody) -> Iterator[Call]:
    """Give a context in which a compiled module is captured whole, and its errors are fxshard's.

    Args:
        net: Whose forward is called.
        announce: As for :func:`own_errors`.
    """
    with (
        own_errors(net, announce),
        whole_graphs(),
        cumulative_averages(net),
        _plain_isinstance(),
        _said_once(),
        _calling() as call,
    ):
        yield call


@contextmanager
def _said_once() -> Iterator[None]:
    """Keep torch from logging the frames of an operator that refuses its inputs: the error says what it said."""
    _FAKE_TENSORS.addFilter(_is_no_error)
    try:
        yield
    finally:
        _FAKE_TENSORS.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


@contextmanager
def _calling() -> Iterator[Call]:
    before, _CAPTURE.active = _CAPTURE.active, True
    call = Call()
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)
        _CAPTURE.active = before


def is_capturing() -> bool:
    """Return whether a module is being captured by fxshard, or runs because Dynamo is off; Dynamo traces this."""
    return _CAPTURE.active if torch.compiler.is_dynamo_compiling() else _call.get() is not None


def counted(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph that counts in the call that runs it."""

    def run(*inputs: Any) -> Any:
        call = _call.get()
        if call is not None:
            call.graphs += 1
        token = _call.set(None)  # nothing is captured in here
        try:
            return graph(*inputs)
        finally:
            _call.reset(token)

    return run


@contextmanager
def _plain_isinstance() -> Iterator[None]:
    """Let ``torch.jit.isinstance``, which ends a graph, be ``isinstance``: the same for classes (MONAI's U-Nets)."""
    get_torch_obj_rule_map()  # else built in here, and the rule that ends the graph is ours
    scripted = torch.jit.isinstance
    torch.jit.isinstance = _isinstance
    try:
        yield
    finally:
        torch.jit.isinstance = scripted


def _isinstance(obj: object, target_type: type) -> bool:
    return isinstance(obj, target_type)


def traceable_call(net: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls ``net``, hooks and all, in a form that Dynamo traces.

    torch 2.11 silently leaves a function of its own files, such as ``Sequential``'s, uncompiled.
    """
    return MethodType(_of_its_own(_call_impl), net)


def traceable_forward(net: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls the forward of ``net`` without its hooks, in a form that Dynamo traces."""
    return MethodType(_of_its_own(_forward), net)


def _of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy with a code object of its own: Dynamo keeps its graphs, and counts them, by that."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)


def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self.forward(*args, **kwargs)


@contextmanager
def own_errors(net: torch.nn.Module, announce: Announce = _to_nobody) -> Iterator[None]:
    """Turn what is raised while a compiled module is called into a :class:`FxShardError` where it is about capture.

    Args:
        net: Whose forward is called.
        announce: Tells the other ranks what was raised; of a disagreement all know.

    Raises:
        CaptureError: Dynamo cannot capture the module whole or once more, or an operator refuses the inputs' shapes or
            types.
        FxShardError: What fxshard raised.
    """
    try:
        yield
    except RankMismatchError:
        raise
    except FxShardError as error:
        announce(str(error), error)
        raise
    except BackendCompilerFailed as error:
        announce(str(error), error)
        if isinstance(error.inner_exception, FxShardError):
            raise error.inner_exception from error
        raise
    except (Unsupported, UserError, InternalTorchDynamoError) as error:
        msg = f"{type(net).__name__} cannot be captured whole: {_refusal(error)}\n{_users_frame(error)}{REMEDY}"
        announce(msg, error)
        raise CaptureError(msg) from error
    except FailOnRecompileLimitHit as error:
        failure = too_many_graphs(type(net).__name__)
        announce(str(failure), failure)
        raise failure from error
    except TorchRuntimeError as error:
        msg = f"{type(net).__name__} does not run on these inputs: {_reason(error)}{_users_line(error)}"
        announce(msg, error)
        raise CaptureError(msg) from error
    except BaseException as error:
        announce(f"{type(error).__name__}: {error}", error)
        raise
    finally:
        forget_told(sys.exc_info()[1])  # it may be raised again, by another call


def _refusal(error: Unsupported | UserError | InternalTorchDynamoError) -> str:
    """Return Dynamo's words without its hints; with ``TORCHDYNAMO_VERBOSE=1`` all of them."""
    if os.environ.get("TORCHDYNAMO_VERBOSE") == "1" or isinstance(error, InternalTorchDynamoError):
        return str(error)
    words = reason_text(error.msg if isinstance(error, Unsupported) else str(error))
    context = _CONTEXT.search(str(error))
    said = context["text"].strip() if context else ""
    return f"{words} ({said})" if said and len(said) <= MOST_CONTEXT and "\n" not in said else words


def _reason(error: TorchRuntimeError) -> str:
    """Return what the operator said: Dynamo quotes it among the arguments and frames."""
    said = _SAID.search(str(error))
    try:
        return str(ast.literal_eval(said["text"])) if said else str(error)
    except (SyntaxError, ValueError):  # not one string
        return str(error)


def _users_line(error: TorchDynamoException) -> str:
    """Return the innermost line that is neither torch's nor fxshard's, to be put behind the reason."""
    frame = users_frame(getattr(error, "real_stack", None) or ())
    return f"\n  at {frame.filename}:{frame.lineno} {frame.line}" if frame else ""


def _users_frame(error: TorchDynamoException) -> str:
    """Return the same as in a traceback."""
    frame = users_frame(getattr(error, "real_stack", None) or ())
    return "".join(traceback.format_list([frame])) if frame else ""


def not_captured(net: torch.nn.Module) -> CaptureError:
    """Return the error for a module that ran and was never captured: its results are one device's."""
    msg = (
        f"{type(net).__name__} ran without being captured: Dynamo is switched off (TORCHDYNAMO_DISABLE, "
        "torch.compiler.disable, torch.compiler.set_stance) or leaves its forward alone; nothing was split"
    )
    return CaptureError(msg)

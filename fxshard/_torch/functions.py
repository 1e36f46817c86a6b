"""Dynamo: the functions that it compiles, also where no backend is called."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._dynamo import callback_handler
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.utils import register_hook_for_recompile_user_context

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType


@dataclass(frozen=True)
class CompiledFunction:
    """A function that Dynamo is about to compile.

    Args:
        code: Of the function.
        backend: What compiles it.
        options: What the backend was given.
        is_whole: Whether it has to be captured whole, with ``fullgraph=True``: else it is an error.
        is_full: Returns whether Dynamo keeps no more graphs of it, under the limits of the moment.
    """

    code: CodeType
    backend: object
    options: dict[str, Any]
    is_whole: bool
    is_full: Callable[[], bool]


COMPILER = ("torch._dynamo.convert_frame", "_compile")
"""The function of Dynamo that compiles one function."""


def watch_functions(
    backend: Callable[..., Any], around: Callable[[CompiledFunction], AbstractContextManager[None]]
) -> None:
    """Enter a context around each compilation of a function for a backend, also where the backend is never called.

    Dynamo leaves a function to Python without a word when it has enough graphs of it, or cannot resume in a loop.  It
    calls a hook before it looks at its limits, and callbacks at the end, which ``torch.compiler.reset`` forgets.

    Args:
        backend: What ``torch.compile`` is given.
        around: Returns the context.  What it raises on entry is what the function's caller gets; it is left with what
            ended the compilation, and raises nothing else.
    """
    entered: list[AbstractContextManager[None]] = []
    handled: list[BaseException | None] = [None]  # the user's, where he calls a model in an except clause

    def begin() -> str:
        end()  # of one that ended before its callbacks
        handled[0] = sys.exc_info()[1]
        if end not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(end)
        function = _compiled_function()
        if function is not None and function.backend is backend:
            context = around(function)
            context.__enter__()
            entered.append(context)
        return ""

    def end(*_: object) -> None:
        ended = sys.exc_info()
        while entered:
            entered.pop().__exit__(*((None, None, None) if ended[1] is handled[0] else ended))

    register_hook_for_recompile_user_context(begin)


def _compiled_function() -> CompiledFunction | None:
    """Return the function whose compilation calls this; no hook is told, so it is read from the compiler's frame."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != COMPILER:
        frame = frame.f_back
    seen = {} if frame is None else frame.f_locals
    if not {"code", "compiler_fn", "one_graph", "cache_size", "compile_id"} <= seen.keys():
        return None
    backend = innermost_backend(seen["compiler_fn"])  # torch.compile's wrapper of what it was given
    return CompiledFunction(
        code=seen["code"],
        backend=getattr(backend, "compiler_fn", backend),
        options=getattr(backend, "kwargs", {}).get("options", {}),
        is_whole=bool(seen["one_graph"]),
        is_full=lambda: bool(exceeds_recompile_limit(seen["cache_size"], seen["compile_id"])[0]),
    )

"""Where the threads of this process are: in which collective, or at which line of the user's program.

Read off the stacks, so that nothing has to be noted while a model runs, and a collective that Inductor's code starts is
seen as well as one of eager mode::

    train.py:31        loss.backward()                                        <- the user's line
    <eval_with_key>    halo_accumulate = torch.ops.fxshard.halo_accumulate    <- the node, where a graph runs as Python
    halo_accumulate    x, dim, bounds, lo, hi, ... = frame.f_locals           <- its arguments: which layers have them
    wire.py            torch.ops._c10d_functional.wait_tensor(buffer)         <- a collective
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxshard.ops.lowering import LOWERINGS
from fxshard.provenance import SITE, all_nodes, is_communication, is_users_file, module_path, source_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from torch import fx

_COLLECTIVE = "_c10d_functional"
_OPERATOR = re.compile(r"fxshard\.(\w+)")
_ASSIGNED = re.compile(r"^(\w+) = torch\.ops\.fxshard\.")
_GENERATED = "<eval_with_key>"
_MOST_NAMED, _COMMENT_LINES = 3, 6
_running: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()
"""The local graphs of this process, as long as somebody keeps them."""


@dataclass(frozen=True)
class Line:
    """A line that a thread is at; the frame's own moves on while it runs.

    Args:
        frame: Its frame.
        number: In the file.
        code: The text.
    """

    frame: FrameType
    number: int
    code: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.frame.f_code.co_filename


def may_run(local: fx.GraphModule) -> fx.GraphModule:
    """Let the collectives of a local graph be told by their layers, as long as the caller keeps it; return it."""
    _running.add(local)
    return local


def is_in_collective() -> bool:
    """Return whether another thread of this process is in a collective of a model."""
    return _lines_in_collective() is not None


def collective() -> str:
    """Return which collective another thread is in: operator, shape and layer, as far as known; else nothing."""
    lines = _lines_in_collective()
    return _described(lines) if lines else ""


def user_line() -> str:
    """Return the innermost line of the main thread that is neither Python's nor an installed package's."""
    for line in _outwards(sys._current_frames().get(threading.main_thread().ident or 0)):
        if is_users_file(line.file) and SITE not in line.file and not line.file.startswith("<"):
            return f"{line.file}:{line.number} in {line.frame.f_code.co_name}: {line.code}"
    return "no line of the user's program"


def _lines_in_collective() -> list[Line] | None:
    for thread, frame in sys._current_frames().items():
        lines = [] if thread == threading.get_ident() else list(_outwards(frame))
        if any(_COLLECTIVE in line.code for line in lines):
            return lines
    return None


def _outwards(frame: FrameType | None) -> Iterator[Line]:
    """Yield where a frame and its callers are, the innermost first."""
    while frame is not None:
        number = frame.f_lineno
        yield Line(frame, number, _code(frame, number))
        frame = frame.f_back


def _code(frame: FrameType, number: int | None) -> str:
    """Return a line of source; nothing where there is none, or where another thread compiles the file just now."""
    try:
        return linecache.getline(frame.f_code.co_filename, number or 0, frame.f_globals).strip()
    except TypeError:  # a frame may be between two lines, and a file that Dynamo makes may have none yet
        return ""


def _described(lines: Sequence[Line]) -> str:
    """Return which collective it is: of the operator's frame, if Python runs it, or of Inductor's comment above it."""
    names = {getattr(lowering, "__code__", None): op for op, lowering in LOWERINGS.items()}
    for frame in (line.frame for line in lines):
        op = names.get(frame.f_code)
        if op is not None:
            arguments = [frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
            return _of_operator(op, arguments, _node_name(lines))
    found = [name for line in lines for name in _OPERATOR.findall(_comment_above(line))]
    return f"fxshard.{found[0]}" if found else next(line.code for line in lines if _COLLECTIVE in line.code)


def _of_operator(op: torch._ops.OpOverload, arguments: Sequence[Any], name: str) -> str:
    x, *rest = arguments
    shape = "x".join(map(str, x.shape))
    nodes = [n for local in list(_running) for n in all_nodes(local) if is_communication(n)]
    fitting = [n for n in nodes if list(n.args[1:]) == rest and _has_shape(n, x.shape)]
    exact = [n for n in fitting if n.name == name and n.target is op]
    return f"{op.name().replace('::', '.')} of {shape}" + _layers(exact or fitting)


def _has_shape(node: fx.Node, shape: torch.Size) -> bool:
    """Return whether a node takes or gives values of a shape: its gradients have the one that it gives."""
    values = [n.meta.get("val") for n in (node, node.args[0]) if isinstance(n, torch.fx.Node)]
    return any(isinstance(v, torch.Tensor) and v.shape == shape for v in values)


def _layers(nodes: Sequence[fx.Node]) -> str:
    places = list(dict.fromkeys(f"{module_path(n) or n.name} {source_line(n)}".strip() for n in nodes))
    if not places:
        return ""
    more = f" or {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
    return " in " + " or ".join(places[:_MOST_NAMED]) + more


def _node_name(lines: Sequence[Line]) -> str:
    """Return the name of the node that is run, where a graph runs as Python code."""
    generated = [line.code for line in lines if line.file.startswith(_GENERATED)]
    found = _ASSIGNED.match(generated[0]) if generated else None
    return found[1] if found else ""


def _comment_above(line: Line) -> str:
    """Return the comment that Inductor writes above what it generates for a node."""
    above = [linecache.getline(line.file, line.number - n, line.frame.f_globals) for n in range(1, _COMMENT_LINES)]
    return next((comment for comment in above if "Original ATen:" in comment), "")

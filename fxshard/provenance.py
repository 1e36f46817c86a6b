"""Where a node comes from: the user's line, the module, and for a local node the planned node.

What is emitted for a planned node names it in ``meta["fxshard_origin"]`` and has its source location::

    planned      gelu        sort @ topk.py:47                       add
    local        gelu        all_gather, sort @ topk.py:47           slice, add
                             '------> sort                           '----> add
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxshard.ops.lowering import LOWERINGS
from fxshard.values import ORIGIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from traceback import FrameSummary

_ROOT = re.compile(r"^L\['\w+'\](\.forward)?(\.__self__)?\.?")
"""How Dynamo names the module that is called."""
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n *(?P<code>.+)', re.MULTILINE)


SITE = "site-packages"
"""In the paths of installed packages."""
_PACKAGE = f"{Path(__file__).parent}/"
"""Where the frames are that lie between Dynamo and the model."""
_TORCH = f"{Path(torch.__file__).parent}/"
_PYTHON = f"{sysconfig.get_path('stdlib')}/"


def source_line(node: fx.Node) -> str:
    """Return the innermost user line of ``node``: ``file:line code``, or nothing where it is not known.

    Args:
        node: Of any graph; the file is relative to where Python found it.
    """
    frames = [f for f in _FRAME.finditer(node.meta.get("stack_trace") or "") if not f["file"].startswith(_PACKAGE)]
    if node.op == "placeholder" or not frames:
        return ""
    frame = frames[-1]
    return f"{_relative(frame['file'])}:{frame['line']} {frame['code']}"


def frame_line(frame: FrameSummary) -> str:
    """Return a frame as ``file:line code``; the file is relative to where Python found it."""
    return f"{_relative(frame.filename)}:{frame.lineno} {frame.line or ''}".rstrip()


def users_frame(stack: Sequence[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame that is neither torch's, nor Python's, nor fxshard's; None where all are.

    Args:
        stack: The innermost frame last.
    """
    return next((frame for frame in reversed(stack) if is_users_file(frame.filename)), None)


def is_users_file(name: str) -> bool:
    """Return whether a file is neither torch's, nor Python's, nor fxshard's; a library's of the user is the user's."""
    is_python = name.startswith(_PYTHON) and SITE not in name
    return not (is_python or name.startswith((_PACKAGE, _TORCH)))


def is_own_fault(error: BaseException) -> bool:
    """Return whether an error was raised in fxshard's own code, not in what it calls."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(_PACKAGE)


def module_path(node: fx.Node) -> str:
    """Return the module that runs ``node``, as ``named_modules`` names it; nothing where it is not known.

    A node of a backward belongs to the module whose gradients it computes.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if node.op == "placeholder" or not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return _ROOT.sub("", path)


def origins(planned: fx.GraphModule, local: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each local node with the planned node that it was emitted for.

    Args:
        planned: A planned graph.
        local: What it was rewritten to.  A node that does not name its origin is taken for the first planned node
            of its source line.
    """
    named = {node.name: node for node in planned.graph.nodes}
    located: dict[tuple[Any, ...], fx.Node] = {}
    for node in planned.graph.nodes:
        located.setdefault(_location(node), node)
    first = next(iter(planned.graph.nodes))
    for node in local.graph.nodes:
        yield node, named.get(node.meta.get(ORIGIN, ""), located.get(_location(node), first))


def _location(node: fx.Node) -> tuple[Any, ...]:
    return node.meta.get("stack_trace"), node.meta.get("seq_nr")


def is_communication(node: fx.Node) -> bool:
    """Return whether ``node`` calls a communication operator."""
    return node.target in LOWERINGS


def all_nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the graphs nested in it."""
    return (n for m in graph.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)


def _relative(file: str) -> str:
    folders = [f.rstrip("/") + "/" for f in sys.path if f and file.startswith(f.rstrip("/") + "/")]
    return file.removeprefix(max(folders, key=len, default=""))

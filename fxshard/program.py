"""A rank's program as text that a reader can follow: its imports, and what each of its inputs is in the model.

::

    # arg0_1    4x3x7x7      the parameter or buffer stem.weight
    # arg2_1    2x3x64x48    args[0], an input of the model
    import torch
    ...
    def forward(self, arg0_1, arg1_1, arg2_1): ...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fxshard.passes.capture import KEY, SOURCE, Captured
from fxshard.values import tensor_value

if TYPE_CHECKING:
    from torch import fx

    from fxshard.passes.config import Config

_IMPORTS = "import torch\nfrom torch import device, inf, nan\n\nimport fxshard.ops  # makes torch.ops.fxshard"
_MEMBER = re.compile(r"\['([^']+)'\]|\.(\w+)")
_INTERNAL = ("self", "__self__", "forward", "_modules", "_parameters", "_buffers")


def program(planned: fx.GraphModule, local: fx.GraphModule, config: Config) -> str:
    """Return the local graph's code under a head that explains it.

    Args:
        planned: The global graph, whose inputs are the model's.
        local: What it was rewritten to for the rank.
        config: The mesh and the rank.
    """
    captured: Captured = planned.meta[KEY]
    ours, theirs = (graph.graph.find_nodes(op="placeholder") for graph in (local, planned))
    rows = [
        (
            node.name,
            _shape(node),
            f"{'the parameter or buffer' if state else 'an input:'} {input_name(whole)}".rstrip(": "),
        )
        for node, whole, state in zip(ours, theirs, captured.is_state, strict=True)
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    rank = config.rank.coords if config.rank is not None else ()
    head = [
        f"What rank {rank} of a mesh of {' x '.join(map(str, config.mesh_shape))} ranks runs in place of the model.",
        "'axis0', 'axis1', ... stand for the process groups of the mesh axes.",
        f"It returns the new values of {len(captured.updates)} buffers, then what the model returns.",
        "",
        *(f"    {name:<{widths[0]}}  {shape:<{widths[1]}}  {what}" for name, shape, what in rows),
    ]
    comment = "\n".join(f"# {line}".rstrip() for line in head)
    return f"{comment}\n{_IMPORTS}\n\n{str(local.code).strip()}"


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return "x".join(map(str, tensor_value(node).shape)) or "scalar" if hasattr(value, "shape") else str(value)


def input_name(placeholder: fx.Node) -> str:
    """Return the user's name of a planned graph's input: ``layer1.0.conv.weight``, ``args[0]``; nothing if not known.

    Args:
        placeholder: Dynamo has left on it how it was reached.
    """
    source = getattr(placeholder, SOURCE, None)
    if source is None:
        return ""
    name = source.name() if callable(source.name) else source.name  # a method in 2.11, a property in 2.14
    if not str(name).startswith("L['self']"):
        return re.sub(r"^L\['(\w+)'\]", r"\1", str(name))
    members = [quoted or attribute for quoted, attribute in _MEMBER.findall(str(name))]
    return ".".join(member for member in members if member not in _INTERNAL)

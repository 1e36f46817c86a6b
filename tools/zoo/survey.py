"""One model's plan at a realistic size, without running it: which work is split, what is gathered, what is sent.

On the tiny images of the comparison the heads dominate; here the plan is made for images of :data:`SIZE` as Dynamo
hands the model to the backend, and nothing is computed::

    FLOPs split       of the global graph's convolutions and matrix products, those whose node is split on some axis
    largest gather    elements of the largest value of the image that all ranks hold whole after an exchange, or
                      whose gradient is, in the backward; the model's outputs, whole by contract, and the partial
                      results of reductions are not counted
    feature map       elements of the largest value at the coarsest resolution, at most 64 times coarser than the
                      image (pyramids pool to less)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import fx

import fxshard
from fxshard.cost import flops
from fxshard.passes.capture import KEY, Captured
from fxshard.provenance import is_communication, module_path, origins
from fxshard.values import is_tensor, plan_of, tensor_value
from tools.zoo.models import build, fitting_size
from tools.zoo.verdict import Setting, Survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxshard.report import PlanReport

SIZE = (512, 1024)
COARSEST = 64
"""Total stride of the coarsest map that counts as one."""
ops = torch.ops.fxshard


def survey(rank: int, name: str, setting: Setting) -> Survey:
    """Plan a model for images of :data:`SIZE` on the setting's mesh.

    Args:
        rank: Not used: nothing is communicated, so any process will do.
        name: The model.
        setting: The mesh.
    """
    del rank
    size = fitting_size(name, SIZE)
    model, inputs = build(name, SIZE)
    torch.compiler.reset()
    placements = setting.placements(name)
    on_meta = [x.to("meta") for x in inputs]
    made = fxshard.plan(
        model.train().to("meta"), on_meta, mesh_shape=setting.mesh, placements=placements, inner_backend="eager"
    )
    operations, share = split_share(made.planned)
    elements, module = largest_gather(made.planned, made.local, made.report)
    halos, reasons = made.report.total.of("halo").bytes, made.report.reasons
    return Survey(size, operations, share, elements, module, feature_map(made.planned), halos, reasons)


def split_share(graph: fx.GraphModule) -> tuple[int, float]:
    """Return the FLOPs of a planned global graph, and the share of those whose node is split on some axis."""
    total = split = 0
    for node in graph.graph.nodes:
        its, found = flops(node), plan_of(node)
        total += its
        split += its if found and found.sharded_axes else 0
    return total, split / total if total else 1.0


def largest_gather(graph: fx.GraphModule, local: fx.GraphModule, report: PlanReport) -> tuple[int, str]:
    """Return the elements of the largest gathered value, outputs and parameters apart, and its module."""
    best = (0, "")
    of_images, emitted = _of_images(graph), dict(origins(graph, local))
    in_backward = {about.name for about in report.nodes if "gather" in about.sent.backward}
    for node, origin in emitted.items():
        source = node
        while is_communication(source) and emitted[source] is origin:
            source = source.args[0]  # type: ignore[assignment]  # a node
        # what was made for the same node is a reduction's partial results, such as the moments of each rank
        if (
            emitted[source] is not origin
            and emitted[source] in of_images
            and origin.op not in ("placeholder", "output")
        ):
            whole = _gathered(node, in_backward=origin.name in in_backward)
            best = max(best, (whole, module_path(origin) or origin.name))
    return best


def _gathered(node: fx.Node, *, in_backward: bool) -> int:
    """Return the elements that ``node`` puts together, or of whose gradient its backward does."""
    source = node.args[0]
    if node.target is ops.all_gather.default:
        return tensor_value(node).numel()
    if node.target is ops.slice.default and in_backward and isinstance(source, fx.Node) and source.op != "placeholder":
        return tensor_value(source).numel()
    return 0


def feature_map(graph: fx.GraphModule) -> int:
    """Return the elements of the largest value at the coarsest resolution, 0 where nothing is like an image."""
    found = _of_images(graph)
    values = [tensor_value(node) for node in graph.graph.nodes if node in found and is_tensor(node)]
    image = max((v for v in values if v.ndim >= 4), key=lambda v: math.prod(v.shape[2:]), default=None)
    if image is None:
        return 0
    maps = [v for v in values if v.ndim == image.ndim and _is_map(v.shape[2:], image.shape[2:])]
    coarsest = min(math.prod(v.shape[2:]) for v in maps)
    return max(v.numel() for v in maps if math.prod(v.shape[2:]) == coarsest)


def _of_images(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs that are not the model's state, and what is computed from them: no kernel is among them."""
    captured: Captured = graph.meta[KEY]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = {node for node, is_state in zip(placeholders, captured.is_state, strict=True) if not is_state}
    for node in graph.graph.nodes:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _is_map(size: Sequence[int], image: Sequence[int]) -> bool:
    return all(i // COARSEST <= s <= i and s > 1 for s, i in zip(size, image, strict=True) if i > 1)

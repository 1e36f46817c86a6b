"""Writes ``docs/strategies.md``: what the planner's choice is estimated to gain over what one would do by hand.

    python -m tools.compare_strategies
    python -m tools.compare_strategies --models resnet50 unet --ranks 2 8 --page /dev/stdout

By hand one splits everything along one dimension, or up to a stage and gathers what is behind it.  Every strategy is
planned and timed as the planner's own choice is, with the same costs: :func:`fxshard.cut_over.as_asked` in place of
:func:`fxshard.cut_over.choices`.  Nothing runs, models and images are on the meta device.  Some minutes for all models.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fxshard.cut_over import Choice, as_asked, choices, in_the_middle
from fxshard.devices import H200
from fxshard.dry_run import captured_graph
from fxshard.passes.config import Config
from fxshard.provenance import module_path
from tools.networks import UNet, made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx, nn

    from fxshard.devices import Device

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
LETTERS = {4: ("N", "C", "H", "W"), 5: ("N", "C", "D", "H", "W")}
"""Of the dimensions of an image."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """A model and what it is trained on.

    Args:
        title: Its name.
        build: Makes it.
        shape: Of the whole batch.
        stages: Its modules behind which one could gather, in the order in which they run.
    """

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    stages: tuple[str, ...]


CONVNEXT = ("stem", *(f"stages.{i}" for i in range(4)))
RESNET = ("maxpool", *(f"layer{i}" for i in range(1, 5)))
DEEPLAB = (*(f"backbone.{stage}" for stage in RESNET), "classifier")


def _unet_stages(levels: int) -> tuple[str, ...]:
    return (*(f"down.{i}" for i in range(levels)), *(f"join.{i}" for i in reversed(range(levels - 1))))


_segmentation = partial(made_by, "torchvision.models.segmentation", "deeplabv3_resnet50", weights_backbone=None)
MODELS = {
    "convnext_tiny": Row(
        "ConvNeXt-T", partial(made_by, "timm", "create_model", "convnext_tiny"), (7, 3, 512, 2048), CONVNEXT
    ),
    "convnext_xlarge": Row(
        "ConvNeXt-XL", partial(made_by, "timm", "create_model", "convnext_xlarge"), (7, 3, 512, 8192), CONVNEXT
    ),
    "resnet50": Row("ResNet-50", partial(made_by, "torchvision.models", "resnet50"), (2, 3, 1080, 1920), RESNET),
    "deeplabv3": Row("DeepLabV3 on ResNet-50", _segmentation, (2, 3, 1080, 1920), DEEPLAB),
    "unet": Row("U-Net", partial(UNet, 2), (2, 3, 1088, 1920), _unet_stages(5)),
    "unet3d": Row("3-D U-Net", partial(UNet, 3, width=32, levels=4, inputs=1), (1, 1, 192, 192, 192), _unet_stages(4)),
}
"""By the names of ``--models``."""


def captured(row: Row, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """Return the functional global graph of a row's model."""
    with torch.device("meta"):
        model, image = row.build().to(dtype), torch.empty(row.shape, dtype=dtype)
    torch.compiler.reset()
    return captured_graph(model, (image,), Config((1,), None, None))


def simple(graph: fx.GraphModule, row: Row, ranks: int, device: Device) -> Iterator[tuple[str, Choice]]:
    """Yield what one would do by hand: along each dimension everything split, or up to a stage.

    Args:
        graph: Captured.
        row: Its model.
        ranks: On one mesh axis.
        device: Of the table.
    """
    for dim, letter in enumerate(LETTERS[len(row.shape)]):
        if letter == "C" or row.shape[dim] < ranks:
            continue
        config = in_the_middle(Config((ranks,), (dim,), None))
        split = as_asked(graph, config, device)
        yield f"all {letter}", split
        for stage in row.stages[:-1]:
            whole = tuple((name, f"behind {stage}") for name in _behind(split.graph, stage))
            yield f"{letter} up to {stage}", as_asked(split.graph, dataclasses.replace(config, whole=whole), device)


def _behind(graph: fx.GraphModule, stage: str) -> list[str]:
    """Return the nodes that run after a module, by name."""
    nodes = list(graph.graph.nodes)
    last = max(place for place, node in enumerate(nodes) if f"{module_path(node)}.".startswith(f"{stage}."))
    return [node.name for node in nodes[last + 1 :] if node.op == "call_function"]


def chosen(graph: fx.GraphModule, ranks: int, device: Device) -> Choice:
    """Return the planner's choice for so many ranks; arguments as :func:`simple`'s."""
    return choices(graph, config=Config((ranks,), None, None), device=device, any_mesh=True)[0]


@dataclass(frozen=True)
class Column:
    """What was found for one precision and number of ranks.

    Args:
        title: Of the column.
        by_hand: Times of the simple strategies, in ms.
        plan: The time of the planner's choice, in ms.
        split: What its mesh axes split, and how many nodes are whole.
    """

    title: str
    by_hand: dict[str, float]
    plan: float
    split: str

    @property
    def best(self) -> float:
        """The time of the best simple strategy."""
        return min(self.by_hand.values())

    @property
    def best_of_image(self) -> float:
        """The time of the best that splits the image, not the batch."""
        return min(ms for name, ms in self.by_hand.items() if "N" not in name.split())


def column(title: str, graph: fx.GraphModule, row: Row, ranks: int, device: Device) -> Column:
    """Compare the strategies; arguments as :func:`simple`'s."""
    by_hand = {name: choice.step_ns for name, choice in simple(graph, row, ranks, device)}
    plan = chosen(graph, ranks, device)
    return Column(title, {name: ns / 1e6 for name, ns in by_hand.items()}, plan.step_ns / 1e6, _said(plan, row))


def _said(plan: Choice, row: Row) -> str:
    letters, dims = LETTERS[len(row.shape)], plan.config.dims or ()
    axes = zip(plan.config.mesh_shape, dims, strict=True)
    nodes = sum(node.op == "call_function" for node in plan.graph.graph.nodes)
    whole = f", {100 * len(plan.config.whole) / nodes:.0f} % whole" if plan.config.whole else ""
    return " x ".join(f"{letters[dim]} {ranks}" for ranks, dim in axes) + whole


def section(row: Row, columns: Sequence[Column]) -> list[str]:
    """Return the lines of a model's table."""
    names = dict.fromkeys(name for found in columns for name in found.by_hand)
    rows = [["ms a step", *(found.title for found in columns)], ["---"] * (len(columns) + 1)]
    rows += [[name, *(_time(found.by_hand.get(name), found.best) for found in columns)] for name in names]
    rows += [
        ["**the planner's**", *(f"**{_ms(found.plan)}**" for found in columns)],
        ["splits", *(found.split for found in columns)],
        ["quicker than the best by hand", *(_gain(found.best, found.plan) for found in columns)],
        ["than the best but of the batch", *(_gain(found.best_of_image, found.plan) for found in columns)],
        ["than the worst", *(_gain(max(found.by_hand.values()), found.plan) for found in columns)],
    ]
    shape = " x ".join(map(str, row.shape))
    return [f"## {row.title}, {shape}", "", *(f"| {' | '.join(cells)} |" for cells in rows), ""]


def _time(ms: float | None, best: float) -> str:
    return "-" if ms is None else f"*{_ms(ms)}*" if ms == best else _ms(ms)


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _gain(other: float, plan: float) -> str:
    times = other / plan
    return f"{100 * (times - 1):.1f} %" if times < 2 else f"{times:.1f} times"


HEAD = """# What planning gains

Written by `python -m tools.compare_strategies` (torch {version}). Estimated times of a training step on {device} GPUs,
by the [planner's table of devices](planning.md#time), in ms: nothing of this was measured. `fp32 x 8` is float32 on
eight ranks.

By hand one splits everything along one dimension (`all W`), or up to a stage, behind which everything is gathered
(`W up to layer2`); what has too few columns for the ranks is gathered in any case. `N` is the batch: data parallelism,
where there is an image for each rank. The best of these is in italics. The planner chooses the dimensions, the shape of
the mesh, and for each node whether it is split or whole (`3 % whole`: of the nodes). Its choice is never slower than
the best by hand: the script fails where it is, and `tests/graph/test_strategies.py` holds the same for smaller models.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 64])
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    lines = [HEAD.format(version=torch.__version__.partition("+")[0], device=H200.name)]
    for row in (MODELS[name] for name in args.models):
        graphs = {name: captured(row, dtype) for name, dtype in DTYPES.items()}
        columns = []
        for name, graph in graphs.items():
            columns += [column(f"{name} x {ranks}", graph, row, ranks, H200) for ranks in args.ranks]
        lines += section(row, columns)
        print(f"{row.title}: {', '.join(f'{c.title} {_gain(c.best, c.plan)}' for c in columns)}", flush=True)
        slower = [f"{c.title}: {c.plan} ms against {c.best} ms" for c in columns if c.plan > c.best]
        if slower:
            parser.exit(1, f"the planner's choice is slower than the best by hand for {row.title}, {slower}\n")
    args.page.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()

"""What changes from step to step: sizes, modes, frozen parameters, layers; exact, compiled once each, and said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fxshard import _torch
from fxshard.errors import FxShardError
from fxshard.workers import mesh
from tests.ranks.training import WAYS, assert_same, compilations, image, logged, pair, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

RANKS = 2
SIZES = (16, 17, 20, 25)


class Net(nn.Module):
    """A stem, a batch norm, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.body, self.drop, self.head = nn.Conv2d(4, 4, 3, 2, 1), nn.Dropout(0.2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.body(torch.sigmoid(self.norm(self.stem(x)))))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


class Plain(nn.Module):
    """A padded convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


class Evaluated(Plain):
    """Another class, so that Dynamo counts its graphs alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def as_it_is(_net: Any) -> None:
    """Change nothing."""


def train(net: Any) -> None:
    net.train()


def evaluate(net: Any) -> None:
    net.eval()


def freeze(net: Any) -> None:
    net.stem.requires_grad_(False)


def unfreeze(net: Any) -> None:
    net.stem.requires_grad_(True)


def freeze_all(net: Any) -> None:
    net.requires_grad_(False)


def wider_head(net: Any) -> None:
    torch.manual_seed(1)
    net.head = nn.Linear(4, 5).double()


def other_head(net: Any) -> None:
    torch.manual_seed(2)
    net.head = nn.Linear(4, 5).double()


def drop_more(net: Any) -> None:
    net.drop.p = 0.5


def average_faster(net: Any) -> None:
    net.norm.momentum = 0.3


def of_width(*widths: int) -> list[tuple[Callable[[Any], None], tuple[int, ...]]]:
    return [(as_it_is, (2, 3, 8, width)) for width in widths]


SHAPE = (2, 3, 8, 16)
# id: what is done before each step, the shape of its images, and how many graphs are compiled for all
PROGRAMS: dict[str, tuple[list[tuple[Callable[[Any], None], tuple[int, ...]]], int]] = {
    "scales": (of_width(*SIZES, *SIZES, *reversed(SIZES)), len(SIZES)),
    "last batch and small images": (
        [*of_width(16), (as_it_is, (1, 3, 8, 16)), *of_width(1, 16, 1, 2), (as_it_is, (1, 3, 8, 16))],
        4,
    ),
    "modes and frozen layers": (
        [(do, SHAPE) for do in (freeze, evaluate, unfreeze, train, freeze, unfreeze, evaluate, freeze_all, train)],
        6,
    ),
    "layers": ([(do, SHAPE) for do in (train, wider_head, other_head, drop_more, average_faster)], 4),
}


def run_program(rank: int, name: str, way: str) -> int:
    """Compare step by step (in a rank process); return how many graphs were compiled."""
    reference, net = pair(Net, way, RANKS)
    with compilations() as compiled:
        for seed, (change, shape) in enumerate(PROGRAMS[name][0]):
            change(reference)
            change(net)
            expected = step(reference, (image(*shape, seed=seed),))
            assert_same(step(net, (image(*shape, seed=seed),)), expected)
    return len(compiled)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_changes_is_exact_and_compiled_once(pool: RankPool, name: str, way: str) -> None:
    assert pool.run(run_program, name, way, ranks=RANKS) == [PROGRAMS[name][1]] * RANKS


def run_other_heads(rank: int, same: bool) -> str:
    """Replace a layer by one of the same sizes, which compiles nothing anew (in a rank process)."""
    _, net = pair(Net, "transform", RANKS)
    with compilations() as compiled:
        for _ in range(2):
            net(image(*SHAPE))
        torch.manual_seed(1 if same else rank)
        net.head = nn.Linear(4, 3).double()
        torch.manual_seed(0)
        try:
            for _ in range(2):
                net(image(*SHAPE))
        except FxShardError as error:
            return str(error)
        finally:
            assert len(compiled) == 1
    return ""


def test_a_new_layer_has_to_be_the_same_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(run_other_heads, True, ranks=RANKS) == ["", ""]
    for said in pool.run(run_other_heads, False, ranks=RANKS):
        assert "parameter or buffer head.weight: rank 0 has " in said
        assert "stem.weight" not in said


MANY = range(4, 16)


def run_many_sizes(rank: int, way: str) -> tuple[int, list[str]]:
    reference, net = pair(Plain, way, RANKS)
    with compilations() as compiled, logged() as lines:
        for width in (*MANY, *MANY):
            assert_same(step(net, (image(1, 3, 4, width),)), step(reference, (image(1, 3, 4, width),)))
    return len(compiled), lines


@pytest.mark.parametrize("way", WAYS)
def test_many_sizes_are_each_compiled_once_and_said(pool: RankPool, way: str) -> None:
    (count, first), (other_count, other) = pool.run(run_many_sizes, way, ranks=RANKS)
    what = {"transform": r"Plain: ", "compile": r"the graph up to .*test_changes.py:\d+ return y: "}[way]
    assert (count, other_count, len(first)) == (len(MANY), len(MANY), len(MANY))
    for number, (line, width) in enumerate(zip(first, MANY, strict=True), 1):
        level, remedy = ("INFO", "$") if number <= 4 else ("WARNING", r"\. Each size is .*; pad images to a few sizes$")
        pattern = rf"{level} {what}compilation {number}, for \S+ float64\[1, 3, 4, {width}\], in \d+\.\d s{remedy}"
        assert re.match(pattern, line), line
    assert {line.partition(" ")[0] for line in other} == {"INFO"}  # one rank speaks for all


def run_past_the_limit(rank: int, way: str) -> tuple[list[str], list[int]]:
    """Pass more sizes than graphs are kept of; then another model takes part (in a rank process)."""
    said = []
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=1), logged():
        patch.setattr(_torch.dynamo, "MOST_GRAPHS", 2)
        reference, net = pair(Evaluated, way, RANKS)
        with compilations() as compiled:
            for width in (8, 9, 10, 8, 10, 9):
                try:
                    found = step(net, (image(1, 3, 4, width),))
                except FxShardError as error:
                    said.append(str(error))
                else:
                    said.append("")
                    assert_same(found, step(reference, (image(1, 3, 4, width),)))
        return said, compiled


@pytest.mark.parametrize("way", WAYS)
def test_more_sizes_than_graphs_are_kept_of_are_an_error_and_never_run_unsplit(pool: RankPool, way: str) -> None:
    message = (
        r"^Evaluated(\.forward \(.*test_changes.py:\d+\))? was compiled for as many sizes of its inputs, modes and "
        r"sets of frozen parameters as Dynamo keeps graphs; one more would run unsplit. Pad the images to a few sizes, "
        r"or raise torch._dynamo.config.recompile_limit$"
    )
    for said, compiled in pool.run(run_past_the_limit, way, ranks=RANKS):
        assert len(compiled) == 2
        assert [bool(text) for text in said] == [False, False, True, False, True, False]
        assert all(re.match(message, text) for text in said if text), said


def run_models_of_one_class(rank: int) -> int:
    """Transform several models of a class: each has its own graphs (in a rank process)."""
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=1):
        patch.setattr(_torch.dynamo, "MOST_GRAPHS", 1)
        nets = [pair(Plain, "transform", RANKS)[1] for _ in range(3)]
        for net in nets:
            net(image(1, 3, 4, 8))
    return len(nets)


def test_graphs_are_counted_for_each_transformed_model(pool: RankPool) -> None:
    assert pool.run(run_models_of_one_class, ranks=RANKS) == [3] * RANKS


def run_unsplit(rank: int, way: str) -> list[str]:
    _, net = pair(Plain, way, RANKS)
    with logged() as lines:
        net(image(1, 3, 4, 1))
    return lines


def run_with_an_idle_axis(rank: int) -> list[str]:
    _, net = pair(Plain, "transform", 4, mesh=mesh((2, 2)), placements=None)
    with logged() as lines:
        net(image(3, 4, 8))
    return lines


def test_an_axis_of_the_mesh_that_has_nothing_to_split_is_said(pool: RankPool) -> None:
    (line,), *_ = pool.run(run_with_an_idle_axis, ranks=4)
    assert line.startswith("WARNING ")
    assert "; ranks run the same work: mesh axis 1 has no dimension left to split" in line


@pytest.mark.parametrize("way", WAYS)
def test_an_image_that_is_not_split_is_said(pool: RankPool, way: str) -> None:
    (line,), _ = pool.run(run_unsplit, way, ranks=RANKS)
    assert line.startswith("WARNING ")
    assert "; every rank runs all of it: dim 3 has 1 columns for 2 ranks, it is not split" in line


# id: options of the transform, and the reason that is named
MOSTLY_WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "channels are split": ({"placements": [Shard(1)]}, "aten.conv2d"),
    "a device for which nothing is worth it": ({"device": "h200"}, "cheaper whole on h200"),
    "as asked": ({"placements": {"": [Shard(3)], "conv": Replicate()}}, "asked for: 'conv' runs whole"),
}


def run_mostly_whole(rank: int, options: dict[str, Any]) -> list[str]:
    _, net = pair(Plain, "transform", RANKS, **options)
    with logged() as lines:
        net(image(1, 3, 8, 16))
    return lines


@pytest.mark.parametrize("name", MOSTLY_WHOLE)
def test_maps_that_are_mostly_whole_are_said(pool: RankPool, name: str) -> None:
    options, why = MOSTLY_WHOLE[name]
    (line,), _ = pool.run(run_mostly_whole, options, ranks=RANKS)
    assert line.startswith("WARNING ")
    assert "; 100 % of the elements of its maps are whole on every rank, first because of " in line
    assert why in line

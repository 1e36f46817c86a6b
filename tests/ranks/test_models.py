"""Unmodified models of timm and torchvision on ranks: everything equals the untouched model in float64.

Two steps in training mode, drop path and drop-out on, in which the weights change in between: outputs, input
gradient, parameter gradients, buffers and generator state; and one in eval mode or without gradients.  ``COVER``
tries every model and every value of each property; the nightly rows are the full product.
"""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard.api import transform
from fxshard.compare import Case, within_own_rounding
from fxshard.rules import registered
from fxshard.trace import build_model, run_steps
from fxshard.workers import mesh
from tests.ranks.checks import Verdict, assert_exact, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fxshard.workers import RankPool

CLASSES = 5
LONGEST_S = 900
"""How long a model may take: Inductor compiles hundreds of kernels of a whole one."""
EVEN, UNEVEN = (64, 128), (97, 130)


def build(name: str, height: int, width: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model as its library makes it, drop path and drop-out on, and a batch of two."""
    import timm
    import torchvision

    image = (torch.randn(2, 3, height, width),)
    if name == "convnext_atto":
        return timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.3, drop_rate=0.2), image
    rates = {"stochastic_depth_prob": 0.3} if name == "convnext_tiny" else {}
    return torchvision.models.get_model(name, num_classes=CLASSES, **rates), image


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        model: Its name.
        split: "H", "W" or "HW".
        ranks: How many; 4 for "HW", as 2 x 2.
        size: Height and width.
        backend: The inner backend.
        mode: "train", "eval" or "no_grad".
    """

    model: str
    split: str
    ranks: int
    size: tuple[int, int]
    backend: str
    mode: str = "train"

    @property
    def id(self) -> str:
        size = "x".join(map(str, self.size))
        return f"{self.model}-{self.split}-{self.ranks}-{size}-{self.backend}-{self.mode}"

    @property
    def case(self) -> Case:
        dims = [{"H": 2, "W": 3}[letter] for letter in self.split]
        return Case(
            partial(build, self.model, *self.size),
            tuple(Shard(dim) for dim in dims),
            (self.ranks,) if len(dims) == 1 else (2, 2),
            self.backend,
            steps=2 if self.mode == "train" else 1,
            training=self.mode != "eval",
            no_grad=self.mode == "no_grad",
        )


MODELS = ("convnext_atto", "convnext_tiny", "resnet18", "resnet50", "regnet_y_400mf")
SMALL = ("convnext_atto", "resnet18")
SPLITS = (*itertools.product("HW", (2, 3, 4)), ("HW", 4))

COVER = (
    Row("convnext_atto", "W", 2, UNEVEN, "eager", "no_grad"),
    Row("convnext_atto", "W", 2, UNEVEN, "aot_eager"),
    Row("convnext_atto", "HW", 4, UNEVEN, "eager"),
    Row("convnext_tiny", "H", 2, EVEN, "eager", "eval"),
    Row("resnet18", "W", 4, EVEN, "eager"),
    Row("resnet50", "H", 2, UNEVEN, "eager"),
    Row("regnet_y_400mf", "W", 3, UNEVEN, "eager"),
)


def full_product() -> Iterator[Row]:
    """Yield every model, split, size and backend in training, and every model and split in the other modes."""
    for model, (split, ranks) in itertools.product(MODELS, SPLITS):
        backends = ("eager", "aot_eager", "inductor") if model in SMALL else ("eager", "aot_eager")
        for size, backend in itertools.product((EVEN, UNEVEN), backends):
            yield Row(model, split, ranks, size, backend)
        for mode in ("eval", "no_grad"):
            yield Row(model, split, ranks, UNEVEN, "eager", mode)


AT_NIGHT = (pytest.mark.nightly, pytest.mark.timeout(LONGEST_S))
NIGHTLY = [pytest.param(row, marks=AT_NIGHT, id=row.id) for row in full_product() if row not in COVER]


@pytest.mark.parametrize("row", [*(pytest.param(row, id=row.id) for row in COVER), *NIGHTLY])
def test_a_model_equals_the_untouched_one(pool: RankPool, row: Row) -> None:
    # the deepest map of 97 or 64 rows has 4 to 2: where those are fewer than ranks, it is gathered
    for (verdict,) in pool.run(judge, [row.case], ranks=row.ranks, timeout_s=LONGEST_S):
        assert verdict.exact, f"{verdict.text}\ngathers: {verdict.reasons}"


def shallow_convnext() -> tuple[nn.Module, tuple[Tensor]]:
    from timm.models.convnext import ConvNeXt

    blocks, channels = (1, 1, 0, 0), (4, 8, 8, 8)
    model = ConvNeXt(depths=blocks, dims=channels, num_classes=CLASSES, drop_path_rate=0.3, drop_rate=0.2)
    return model, (torch.randn(2, 3, 72, 64),)  # 2 rows deep down


def shallow_resnet() -> tuple[nn.Module, tuple[Tensor]]:
    from torchvision.models.resnet import BasicBlock

    layers: list[nn.Module] = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    block = [nn.MaxPool2d(3, 2, 1), nn.Dropout2d(0.2), BasicBlock(8, 8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers, *block, *head), (torch.randn(2, 3, 37, 45),)


def stem() -> tuple[nn.Module, tuple[Tensor]]:
    first = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, CLASSES)]
    return nn.Sequential(*first, *head), (torch.randn(2, 3, 37, 45),)


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(stem, id="stem"),
        pytest.param(shallow_resnet, marks=AT_NIGHT, id="resnet"),
        pytest.param(shallow_convnext, marks=AT_NIGHT, id="convnext"),
    ],
)
def test_inductor_equals_the_untouched_model(pool: RankPool, net: Callable[..., Any]) -> None:
    assert_exact(pool, Case(net, (Shard(2),), inner_backend="inductor"))


class Volume(nn.Module):
    """A network on (N, C, D, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv3d(2, 4, (3, 5, 3), stride=(1, 2, 1), padding=(1, 2, 1)), nn.BatchNorm3d(4)
        self.pool, self.conv = nn.MaxPool3d(3, 2, 1), nn.Conv3d(4, 4, 3, padding=2, dilation=2)
        self.drop, self.head = nn.Dropout3d(0.3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(F.relu(self.norm(self.stem(x))))
        y = self.drop(self.conv(y) + y)
        logits: Tensor = self.head(F.adaptive_avg_pool3d(y, 1).flatten(1))
        return logits


def volume() -> tuple[nn.Module, tuple[Tensor]]:
    return Volume(), (torch.randn(2, 2, 11, 18, 13),)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [((2,), (2,)), ((3,), (3,)), ((4,), (4,)), ((2, 4), (2, 2)), ((3, 4), (2, 2))],
    ids=["D-2", "H-3", "W-4", "DxW-2x2", "HxW-2x2"],
)
def test_a_volume_equals_the_untouched_model(pool: RankPool, dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert_exact(pool, Case(volume, tuple(Shard(dim) for dim in dims), shape))


def _narrowing() -> list[nn.Module]:
    """9 -> 5 -> 3 -> 2 -> 1 columns, then as wide as before."""
    strided = [nn.Conv2d(4, 4, 3, (1, 2), 1) for _ in range(4)]
    norms = [nn.BatchNorm2d(4) for _ in range(4)]
    return [
        *itertools.chain(*zip(strided, norms, strict=True)),
        nn.Upsample(size=(6, 9)),
        nn.Conv2d(4, 3, 7, padding=3),
    ]


# id: layers, width, ranks, whether a map has fewer columns than ranks
NARROW: dict[str, tuple[Callable[[], list[nn.Module]], int, int, bool]] = {
    "one-column-each": (lambda: [nn.Conv2d(4, 4, 7, padding=3)], 4, 4, False),
    "halo-over-all-ranks": (lambda: [nn.Conv2d(4, 4, (1, 11), padding=(0, 5)), nn.BatchNorm2d(4)], 5, 4, False),
    "dilated": (lambda: [nn.Conv2d(4, 4, 5, padding=8, dilation=4), nn.Conv2d(4, 2, 3)], 7, 3, False),
    "two-columns-of-three": (lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)], 5, 3, False),
    "deepest-map-of-one": (_narrowing, 9, 3, True),
    "deepest-map-of-two": (lambda: [nn.MaxPool2d((1, 4)), nn.Conv2d(4, 4, 7, padding=3), nn.ReLU()], 11, 4, True),
    "image-narrower-than-ranks": (lambda: [nn.Conv2d(4, 4, 3, padding=1)], 3, 4, True),
}


def narrow(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    layers, width, _, _ = NARROW[name]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), *layers()), (torch.randn(2, 2, 6, width),)


@pytest.mark.parametrize("name", NARROW)
def test_shards_smaller_than_the_halo_and_maps_narrower_than_ranks_are_exact(pool: RankPool, name: str) -> None:
    _, _, ranks, gathers = NARROW[name]
    verdict = assert_exact(pool, Case(partial(narrow, name), mesh_shape=(ranks,)), gathers=gathers)
    assert any(f"columns for {ranks} ranks" in reason for reason in verdict.reasons) == gathers


def judge_float32(rank: int, case: Case) -> bool:
    """Whether the sharded float32 model is as near to float64 as the untouched one (in a rank process)."""
    single = replace(case, dtype=torch.float32)
    truth, untouched = (run_steps(*build_model(c), c) for c in (case, single))
    torch.compiler.reset()
    model, inputs = build_model(single)
    net = transform(model, mesh=mesh(case.mesh_shape), placements=case.placements, inner_backend=case.inner_backend)
    return within_own_rounding(truth, untouched, run_steps(net, inputs, single))


@pytest.mark.parametrize("net", [shallow_convnext, shallow_resnet], ids=["convnext", "resnet"])
def test_float32_is_as_precise_as_the_untouched_model(pool: RankPool, net: Callable[..., Any]) -> None:
    assert pool.run(judge_float32, Case(net, mesh_shape=(3,)), ranks=3) == [True] * 3


@contextmanager
def without_rules(names: tuple[str, ...]) -> Iterator[None]:
    """Take the rules of operators out of the registry."""
    rules = registered()
    gone = {op: rule for op, rule in rules.items() if str(op).removeprefix("aten.") in names}
    assert len(gone) == len(names), f"{names} are not all registered"
    for op in gone:
        del rules[op]
    try:
        yield
    finally:
        rules.update(gone)


def judge_without(rank: int, names: tuple[str, ...], case: Case) -> Verdict:
    with without_rules(names):
        return judge(rank, [case])[0]


MAX_POOLS = ("max_pool2d.default", "max_pool2d_with_indices.default")

# id: the rules to take out, the model that needs them, the reason in the plan
UNRULED: dict[str, tuple[tuple[str, ...], Callable[..., Any], str]] = {
    "conv": (("conv2d.default", "convolution.default"), shallow_convnext, "no rule for aten.convolution.default"),
    "max-pool": (MAX_POOLS, shallow_resnet, "no rule for aten.max_pool2d_with_indices.default"),
    "moments": (("var_mean.correction",), shallow_resnet, "no rule for aten.var_mean.correction"),
    "pointwise": (("Tag.pointwise",), shallow_convnext, "no rule for aten.add.Tensor"),
}


@pytest.mark.parametrize("name", UNRULED)
def test_an_operator_without_a_rule_is_gathered_and_exact(pool: RankPool, name: str) -> None:
    gone, net, reason = UNRULED[name]
    for verdict in pool.run(judge_without, gone, Case(net), ranks=2):
        assert verdict.exact, verdict.text
        assert reason in verdict.reasons


def graphs_for_one_rank(rank: int, case: Case) -> tuple[list[list[str]], bool]:
    """Return the nodes that the inner backend gets without and with fxshard, and whether the results are equal."""
    seen: list[list[str]] = []

    def record(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nodes = [n for n in gm.graph.nodes if n.op != "placeholder"]  # the inputs' names and order are Dynamo's
        seen.append([f"{n.name} {n.target}" for n in nodes])
        return gm.forward

    torch._dynamo.register_backend(record, name="fxshard_tests_record")
    results = []
    for sharded in (False, True):
        torch.compiler.reset()
        model, (image,) = build_model(case)
        if sharded:
            net: Any = transform(model, mesh=mesh((1,)), inner_backend="fxshard_tests_record")
        else:
            net = torch.compile(model, backend="fxshard_tests_record", fullgraph=True, dynamic=False)
        torch.manual_seed(0)
        results.append(net(image))
    return seen, torch.equal(*results)


def test_one_rank_hands_the_untouched_graph_to_the_inner_backend(pool: RankPool) -> None:
    (seen, equal) = pool.run(graphs_for_one_rank, Case(shallow_convnext), ranks=1)[0]
    assert equal
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not [line for line in seen[1] if "fxshard." in line]


def test_the_table_covers_every_model_and_every_property() -> None:
    assert {row.model for row in COVER} == set(MODELS)
    assert {row.split for row in COVER} == {"H", "W", "HW"}
    assert {row.ranks for row in COVER} == {2, 3, 4}
    assert {row.mode for row in COVER} == {"train", "eval", "no_grad"}
    assert {row.backend for row in COVER} == {"eager", "aot_eager"}  # a batch norm under others: test_inductor[stem]
    for family in ("convnext", "res"):
        rows = [row for row in COVER if row.model.startswith(family)]
        assert {row.size for row in rows} == {EVEN, UNEVEN}
        assert {row.split for row in rows} >= {"H", "W"}
    assert all(math.prod(row.case.mesh_shape) == row.ranks for row in COVER)

"""What is passed to a model: whatever it is, each rank gets one device's result, or is told what to change."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fxshard.errors import FxShardError
from fxshard.workers import mesh
from tests.ranks.training import WAYS, assert_same, image, pair, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

RANKS = 2
LIMIT_S = 15.0


@dataclass
class Map:
    """What a model returns."""

    features: Tensor
    scale: int


class Net(nn.Module):
    """Two convolutions and a batch norm, with arguments of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(
        self, x: Tensor, offset: float | Tensor = 0.0, *, double: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        y = torch.sigmoid(self.norm(self.first(x))) + offset
        y = y * 2 if double else y
        y = y if mask is None else torch.where(mask, y, 0.0)
        z: Tensor = self.second(y)
        return z


class Plain(nn.Module):
    """A padded convolution, whose border and middle are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


class Nested(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"maps": [y, (y.mean((2, 3)), None)], "name": "maps", "count": 2}


class Structured(Plain):
    def forward(self, x: Tensor) -> Any:
        return Map(super().forward(x), 3)


class Bytes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double() / 255)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Pixels(nn.Module):
    """A mean of pixels: takes images without any."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 1, 1), 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(x * self.weight)
        return y, y.sum((2, 3))


def with_holes() -> Tensor:
    x = image(2, 3, 8, 17)
    x[0, 1, 3, 5], x[1, 0, 2, 11], x[1, 2, 0, 0] = float("nan"), float("inf"), -float("inf")
    return x


SHAPE = (2, 3, 8, 17)
EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "no numbers": (Plain, lambda: (with_holes(),)),
    "no numbers in a batch norm": (Net, lambda: (with_holes(),)),
    "every second column": (Net, lambda: (image(2, 3, 8, 40)[..., 3:37:2],)),
    "expanded batch": (Net, lambda: (image(1, 3, 8, 17).expand(SHAPE),)),
    "expanded width": (Net, lambda: (image(2, 3, 8, 1).expand(SHAPE),)),
    "transposed": (Net, lambda: (image(2, 3, 17, 8).transpose(2, 3),)),
    "channels last": (Net, lambda: (image(*SHAPE).to(memory_format=torch.channels_last),)),
    "flipped": (Net, lambda: (image(*SHAPE).flip(3),)),
    "overlapping": (Net, lambda: (image(400).as_strided(SHAPE, (100, 30, 3, 1)),)),
    "no images": (Net, lambda: (image(0, 3, 8, 17),)),
    "no columns": (Pixels, lambda: (image(2, 3, 8, 0),)),
    "no rows": (Pixels, lambda: (image(2, 3, 0, 17),)),
    "fewer columns than ranks": (Plain, lambda: (image(2, 3, 8, 1),)),
    "numbers by keyword": (Net, lambda: {"x": image(*SHAPE), "offset": 1, "double": True}),
    "nothing by keyword": (Net, lambda: {"x": image(*SHAPE), "offset": 1.5, "double": None, "mask": None}),
    "a mask by keyword": (Net, lambda: {"x": image(*SHAPE), "mask": image(2, 1, 8, 17) > 0}),
    "a scalar tensor": (Net, lambda: {"x": image(*SHAPE), "offset": torch.tensor(1.5, dtype=torch.float64)}),
    "nested outputs": (Nested, lambda: (image(*SHAPE),)),
    "a dataclass": (Structured, lambda: (image(*SHAPE),)),
    "bytes": (Bytes, lambda: ((image(*SHAPE) * 40).to(torch.uint8),)),
    "truth values": (Bytes, lambda: (image(*SHAPE) > 0,)),
    "nothing trained": (Frozen, lambda: (image(*SHAPE),)),
    "no gradient of the input": (Net, lambda: (image(*SHAPE),)),
    "no gradient at all": (Frozen, lambda: (image(*SHAPE),)),
}


def run_exact(rank: int, name: str, way: str) -> None:
    """Compare two steps (in a rank process)."""
    build, inputs = EXACT[name]
    reference, net = pair(build, way, RANKS)
    gradients = not name.startswith("no gradient")
    for _ in range(2):
        assert_same(step(net, inputs(), gradients=gradients), step(reference, inputs(), gradients=gradients))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXACT)
def test_inputs_of_all_kinds_are_exact(pool: RankPool, name: str, way: str) -> None:
    pool.run(run_exact, name, way, ranks=RANKS)


def run_parts(rank: int, widths: tuple[int, ...]) -> None:
    """Pass parts of which some, or all, have no columns (in a rank process)."""
    reference, net = pair(Pixels, "transform", len(widths), inputs="local")
    whole = image(2, 3, 8, sum(widths))
    found = step(net, (whole.split(widths, 3)[rank],))
    expected = step(reference, (whole,))
    of_input = next(name for name in expected if name.startswith("gradient of input"))
    assert_same(found, {**expected, of_input: expected[of_input].split(widths, 3)[rank]})


@pytest.mark.parametrize("widths", [(5, 0, 4), (0, 0, 0)], ids=str)
def test_parts_without_columns_are_exact(pool: RankPool, widths: tuple[int, ...]) -> None:
    pool.run(run_parts, widths, ranks=len(widths))


@dataclass(frozen=True)
class Said:
    """What a rank was told: the error's class and message, nothing where there was none, and after how long."""

    kind: str
    text: str
    is_ours: bool
    seconds: float


def said_by(call: Callable[[], Any]) -> Said:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Said(type(error).__name__, str(error), isinstance(error, FxShardError), time.monotonic() - start)
    return Said("", "", False, time.monotonic() - start)


LINE = r"\n  at .*test_inputs.py:\d+ y: Tensor = self.conv\(x\)"
# id: the model, its inputs, what transform says, and whether the backend says it, too, where Dynamo does not before
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, bool]] = {
    "no columns": (Plain, lambda: (image(2, 3, 8, 0),), f"does not run on these inputs: .*Kernel size.*{LINE}", False),
    "another type": (Plain, lambda: (image(*SHAPE).float(),), f"these inputs: .*should be the same{LINE}", False),
    "another device": (Plain, lambda: (image(*SHAPE).to("meta"),), "device", False),
    "no tensor": (Plain, lambda: (3,), "Plain cannot be captured whole: ", False),
    "nothing": (Plain, tuple, "Plain cannot be captured whole: ", False),
    "a scalar": (Plain, lambda: (torch.zeros((), dtype=torch.float64),), f"these inputs: .*size: \\[\\]{LINE}", False),
    "no batch": (
        Plain,
        lambda: (image(3, 8, 17),),
        r"placements split dim 3 of inputs of shapes \[\(3, 8, 17\)\]; name a dim below 3",
        True,
    ),
    "the device of no rank": (
        lambda: Plain().to("meta"),
        lambda: (image(*SHAPE).to("meta"),),
        "the mesh is one of 'cpu' devices, elsewhere are conv.weight on meta, conv.bias on meta, .* on meta; move the",
        True,
    ),
}


def run_refused(rank: int, name: str, way: str) -> Said:
    build, inputs, _, _ = REFUSED[name]
    _, net = pair(build, way, RANKS)
    return said_by(lambda: net(*inputs()))


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_do_not_fit_are_refused_on_every_rank(pool: RankPool, name: str) -> None:
    *_, message, own = REFUSED[name]
    for way in ("transform", "compile") if own else ("transform",):
        for said in pool.run(run_refused, name, way, ranks=RANKS):
            assert said.is_ours, said
            assert re.search(message, said.text, re.DOTALL), said.text
            assert said.seconds < LIMIT_S


PLACEMENTS: dict[str, tuple[Any, str]] = {
    "the batch": ([Shard(0)], ""),
    "the channels": ([Shard(1)], ""),
    "in a tuple": ((Shard(2),), ""),
    "none": ([Replicate()], ""),
    "no such dimension": ([Shard(5)], r"split dim 5 of inputs of shapes \[\(2, 3, 8, 17\)\]; name a dim below 4"),
    "from the end": ([Shard(-1)], r"has Shard\(dim=-1\); it takes .* dim >= 0, counted from the front"),
    "more than axes": ([Shard(2), Shard(3)], "mesh axes: 1, placements: 2; give one for each axis"),
    "no list": (Shard(3), r"placements=Shard\(dim=3\) is no list; give one for each mesh axis, such as \[Shard\(3\)\]"),
}


def run_placements(rank: int, name: str) -> list[Said]:
    def run(way: str) -> None:
        reference, net = pair(Plain, way, RANKS, placements=PLACEMENTS[name][0])
        assert_same(step(net, (image(*SHAPE),)), step(reference, (image(*SHAPE),)))

    return [said_by(partial(run, way)) for way in WAYS]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_split_or_are_refused(pool: RankPool, name: str) -> None:
    for said in (said for of_rank in pool.run(run_placements, name, ranks=RANKS) for said in of_rank):
        assert bool(PLACEMENTS[name][1]) == said.is_ours, said
        assert re.search(PLACEMENTS[name][1], said.text), said.text


OUTSIDE = r"rank \d is not in the mesh of ranks \[1, 2\]; transform the model on those ranks only"
ALONE = (
    r"rank \d is not in the mesh of ranks \[0\]; transform the model on those ranks only, or with a mesh of all: "
    r"init_device_mesh\('cpu', \(4,\)\)"
)
DESCENDING = r"the ranks \[3, 2, 1, 0\] of the mesh do not ascend .*; use \[0, 1, 2, 3\] in the shape \(4,\)"
ELSEWHERE = "the mesh is one of 'cuda' devices, elsewhere are conv.weight on cpu, conv.bias on cpu, .*; move the model"
# id: the mesh, and what each of four ranks is told
MESHES: dict[str, tuple[Callable[[], Any], tuple[str, str, str, str]]] = {
    "of some ranks": (lambda: DeviceMesh("cpu", [1, 2]), (OUTSIDE, "", "", OUTSIDE)),
    "of one rank": (lambda: init_device_mesh("cpu", (1,)), ("", *(ALONE,) * 3)),
    "of descending ranks": (lambda: DeviceMesh("cpu", [3, 2, 1, 0]), (DESCENDING,) * 4),
    "of another device": (lambda: DeviceMesh("cuda", [0, 1, 2, 3]), (ELSEWHERE,) * 4),
    "of three axes": (lambda: init_device_mesh("cpu", (1, 4, 1)), ("",) * 4),
    "no mesh": (lambda: [0, 1, 2, 3], (r"mesh=\[0, 1, 2, 3\] is no DeviceMesh; make one with .*init_device_mesh",) * 4),
}


def run_mesh(rank: int, name: str) -> list[Said]:
    made = MESHES[name][0]()

    def run(way: str) -> None:
        reference, net = pair(Plain, way, 4, mesh=made, placements=None)
        assert_same(step(net, (image(*SHAPE),)), step(reference, (image(*SHAPE),)))

    return [said_by(partial(run, way)) for way in WAYS]


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_fits_or_is_refused(pool: RankPool, name: str) -> None:
    for found, message in zip(pool.run(run_mesh, name, ranks=4), MESHES[name][1], strict=True):
        for said in found:
            assert bool(message) == said.is_ours, said
            assert re.search(message, said.text), said.text
            assert said.seconds < LIMIT_S


def last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


X = image(*SHAPE)
# id: what each of two ranks passes; what the ranks are told, "" where they get one device's result
DIFFERENT: dict[str, tuple[Any, Any, tuple[str, str]]] = {
    "memory format": ({"x": X}, {"x": last(X)}, ("", "")),
    "gradient": (
        {"x": X},
        {"x": X.clone().requires_grad_()},
        (r"need a gradient: rank 0 has all but (x|kwargs\['x'\]), rank 1 has everything",) * 2,
    ),
    "type": ({"x": X}, {"x": X > 0}, ("rank 1: .*should be the same", "should be the same")),
    "device": ({"x": X}, {"x": X.to("meta")}, ("rank 1: .*device", "device")),
    "keyword": ({"x": X}, {"x": X, "double": True}, ("captured graph: rank 0 has ",) * 2),
    "number": ({"x": X, "offset": 1.0}, {"x": X, "offset": 2.0}, ("captured graph: rank 0 has ",) * 2),
    "mask": (
        {"x": X},
        {"x": X, "mask": X[:, :1] > 0},
        ("input types: rank 0 has float64 on cpu, rank 1 has float64 on cpu, bool on cpu",) * 2,
    ),
}


def run_different(rank: int, name: str, way: str) -> list[Said]:
    """Pass what this rank does at the first call, and after both have passed either (in a rank process)."""
    found = []
    for later in (False, True):
        _, net = pair(Net, way, 2)
        for inputs in DIFFERENT[name][:2] if later else ():
            said_by(partial(net, **inputs))
        found.append(said_by(partial(net, **DIFFERENT[name][:2][rank])))
        dist.barrier(mesh((2,)).get_group())  # nobody is in a collective of the model
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_pass_different_things_are_told(pool: RankPool, name: str, way: str) -> None:
    for found, message in zip(pool.run(run_different, name, way, ranks=2), DIFFERENT[name][2], strict=True):
        for said in found:
            assert bool(message) == bool(said.kind), said
            assert re.search(message, said.text, re.DOTALL), said.text
            assert said.seconds < LIMIT_S

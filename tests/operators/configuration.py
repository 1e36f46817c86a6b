"""Configurations of operators on a split image, drawn from a seed.

A configuration is a chain of one to three operators with pointwise functions in front of each, so that what reaches
an operator is the result of split work, with the uneven and empty shards that the operators before left::

    Drawn(shape=(2, 3, 17, 30), chain=(Op('pointwise', kind='sin'), Op('conv', ...), ...), mesh=(2, 2), dims=(2, 3))

``draw(seed, index)`` is a function of its arguments; the repr of a configuration makes it again without them.
"""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard.compare import Case, Trace, difference
from fxshard.trace import build_model, run_steps
from tests.operators.branched import BRANCHED
from tests.operators.family import Op, Shape
from tests.operators.mapped import MAPPED
from tests.operators.windowed import WINDOWED

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES = WINDOWED | MAPPED | BRANCHED
SPLITS: dict[int, dict[tuple[Shape, Shape], int]] = {
    1: {((2,), (2,)): 4, ((2,), (3,)): 2, ((2,), (4,)): 1, ((0, 2), (2, 2)): 1},
    2: {
        ((3,), (2,)): 7,
        ((3,), (3,)): 4,
        ((3,), (4,)): 1,
        ((2,), (2,)): 3,
        ((2,), (3,)): 1,
        ((2, 3), (2, 2)): 4,
        ((2, 3), (1, 3)): 1,
        ((0, 3), (2, 2)): 1,
        ((3,), (1,)): 1,
    },
    3: {((4,), (2,)): 4, ((2,), (3,)): 1, ((4,), (3,)): 1, ((3, 4), (2, 2)): 2, ((2, 3, 4), (1, 2, 2)): 1},
}
"""For each number of spatial dimensions: (the dimension that each mesh axis splits, mesh shape) and how often."""
MESHES = tuple(dict.fromkeys(mesh for splits in SPLITS.values() for _, mesh in splits))
MOST_POSITIONS = 3000
"""Of an image; an operator's result may have eight times as many elements in all."""
MOST_ELEMENTS = 40_000
ATTEMPTS = 8
REFUSALS = (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError)
"""What torch raises for options that do not fit."""
WELL_CONDITIONED = 1e-11
ROUNDING = 2.0**-50
EXACT = ("pointwise", "max_pool", "adaptive_max", "pad", "slice", "roll", "join", "shuffle", "unfold")
"""Families that choose and move values, or treat each alone: no sum whose order decides its rounding."""


@dataclass(frozen=True)
class Drawn:
    """A chain of operators on a split image.

    Args:
        shape: Of the input (N, C, spatial...).
        chain: The operators, in order.
        mesh: Ranks per mesh axis.
        dims: The dimension that each axis splits.
        ties: Whether the input has small whole numbers, many of them equal.
    """

    shape: Shape
    chain: tuple[Op, ...]
    mesh: Shape
    dims: Shape
    ties: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the chain's operators, without pointwise ones unless there is nothing else."""
        return tuple(op.name for op in self.chain if op.name != "pointwise") or ("pointwise",)

    def image(self) -> Tensor:
        """The input."""
        generator = torch.Generator().manual_seed(prod(self.shape))
        if self.ties:
            return torch.randint(-2, 3, self.shape, generator=generator).double()
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)


class Chain(nn.Module):
    """The operators of a configuration; each is built for the shape that the one before leaves."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.operators = nn.ModuleList()
        x = torch.zeros(drawn.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(prod(drawn.shape))  # the same parameters alone and in a pack
            for op in drawn.chain:
                self.operators.append(FAMILIES[op.name].build(tuple(x.shape), **op.options))
                x = _first(_probe(self.operators[-1], x))

    def forward(self, x: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        for operator in self.operators:
            found = operator(x)
            x, *further = found if isinstance(found, tuple) else (found,)
            results += further
        return [x, *results]


def draw(seed: int, index: int) -> Drawn:
    """Return configuration ``index`` of ``seed``, one that torch accepts on one device."""
    chance = random.Random(f"fxshard {seed} {index}")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        while True:
            drawn = _draw(chance)
            if drawn is not None and is_valid(drawn):
                return drawn


def is_valid(drawn: Drawn) -> bool:
    """Return whether torch computes the configuration on one device, to finite and well-conditioned results.

    Ill-conditioned is what rounding alone changes by more than a hundredth of the contract's 1e-9: a small gradient
    that is left of large ones, or a sum of zero in front of a kink, which rounding puts on one side of it.
    """
    try:
        if not _stays_finite(drawn):
            return False
        reference, moved = _on_one_device(drawn, 0.0), _on_one_device(drawn, ROUNDING)
    except REFUSALS:
        return False
    (step,) = reference.steps
    values = (*step.outputs.values(), *step.input_gradients.values(), *step.parameter_gradients.values())
    if not all(value.numel() and value.isfinite().all() for value in values if value is not None):
        return False
    return difference(reference, moved).exact(WELL_CONDITIONED)


def _stays_finite(drawn: Drawn) -> bool:
    """Return whether every operator's result is finite: behind an empty window of a max pool ATen corrupts memory."""
    x = drawn.image()
    for operator in Chain(drawn).double().operators:
        x = _first(_probe(operator, x))
        if not (x.numel() and x.isfinite().all()):
            return False
    return True


def _on_one_device(drawn: Drawn, rounding: float) -> Trace:
    """Run the untouched operators, the image and the results of those that round moved a little.

    The image is scaled, so that equal values stay equal: which of them a pool picks is not a matter of rounding.
    """
    chain, generator = Chain(drawn), torch.Generator().manual_seed(0)

    def move(_module: nn.Module, _inputs: Any, found: Any) -> Any:
        x = _first(found)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.detach().abs().max()
        return (x + rounding * noise, *found[1:]) if isinstance(found, tuple) else x + rounding * noise

    for op, operator in zip(drawn.chain, chain.operators, strict=True):
        if rounding and op.name not in EXACT:
            operator.register_forward_hook(move)
    case = Case(lambda: (chain, (drawn.image() * (1 + rounding),)), steps=1)
    return run_steps(*build_model(case), case)


def smaller(drawn: Drawn) -> Iterator[Drawn]:
    """Yield configurations with one part less, for the search for the smallest that fails."""
    for at in range(len(drawn.chain)):
        yield _with(drawn, chain=drawn.chain[:at] + drawn.chain[at + 1 :])
    for axis in range(len(drawn.mesh)):
        if len(drawn.mesh) > 1:
            mesh, dims = list(drawn.mesh), list(drawn.dims)
            del mesh[axis], dims[axis]
            yield _with(drawn, mesh=tuple(mesh), dims=tuple(dims))
        elif drawn.mesh[axis] > 2:
            yield _with(drawn, mesh=(drawn.mesh[axis] - 1,))
    for dim, size in enumerate(drawn.shape):
        for less in sorted({1, size // 2, size - 1} - {0, size}):
            yield _with(drawn, shape=(*drawn.shape[:dim], less, *drawn.shape[dim + 1 :]))


def _with(drawn: Drawn, **changes: Any) -> Drawn:
    return Drawn(**(vars(drawn) | changes))


def _draw(chance: random.Random) -> Drawn | None:
    spatial = chance.choice((1, 2, 2, 2, 3))
    splits = SPLITS[spatial]
    dims, mesh = chance.choices(list(splits), list(splits.values()))[0]
    shape = (chance.randint(1, 3), chance.choice((1, 2, 3, 4, 6)), *_sizes(chance, spatial))
    chain: list[Op] = []
    x: Tensor = torch.rand(shape)
    for _ in range(chance.choice((1, 1, 2, 2, 2, 3))):
        for family in ("pointwise", None):
            op, x = _draw_operator(chance, x, family)
            if op is None:
                return None
            chain.append(op)
        if x.ndim < 3:
            break
    return Drawn(shape, tuple(chain), mesh, dims, ties=chance.random() < 0.2)


def _sizes(chance: random.Random, spatial: int) -> Shape:
    most = (0, 40, 40, 24)[spatial]
    while True:
        sizes = tuple(chance.randint(1, most) for _ in range(spatial))
        if prod(sizes) <= MOST_POSITIONS:
            return sizes


def _draw_operator(chance: random.Random, x: Tensor, family: str | None) -> tuple[Op | None, Tensor]:
    """Return an operator that torch accepts for ``x``, and its result; None where a few attempts find none."""
    names = [name for name, f in FAMILIES.items() if x.ndim - 2 in f.spatial and name != "pointwise"]
    for _ in range(ATTEMPTS):
        name = family or chance.choices(names, [FAMILIES[n].weight for n in names])[0]
        shape = tuple(x.shape)
        op = Op(name, **FAMILIES[name].draw(chance, shape))
        try:
            result = _first(_probe(FAMILIES[name].build(shape, **op.options), x))
        except REFUSALS:
            continue
        if result.is_floating_point() and 0 < result.numel() <= MOST_ELEMENTS and result.isfinite().all():
            return op, result
    return None, x


def _probe(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return copy.deepcopy(module)(x)  # running statistics stay what they are


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found

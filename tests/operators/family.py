"""An operator with its options as data, and the families that options are drawn from.

A family is a pair of functions::

    draw(chance, shape) -> options          what may be asked of an input of this shape
    build(shape, **options) -> nn.Module    the module that does it

Options that torch refuses for the shape may be drawn: such a configuration is drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Shape: TypeAlias = tuple[int, ...]
Options: TypeAlias = dict[str, Any]


class Op:
    """One operator of a configuration; its repr makes it again.

    Args:
        name: The family.
        options: What the family's build function is called with, besides the shape.
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        return f"Op({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and (self.name, self.options) == (other.name, other.options)

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True)
class Family:
    """Operators of one kind.

    Args:
        draw: The options.
        build: The module.
        spatial: The numbers of spatial dimensions that the family is there for.
        weight: How often it is drawn.
    """

    draw: Callable[[Random, Shape], Options]
    build: Callable[..., nn.Module]
    spatial: tuple[int, ...] = (1, 2, 3)
    weight: int = 2


class Apply(nn.Module):
    """A function with fixed options as a module."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.args, self.options = function, args, options

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.args, **self.options)


def numbers(chance: Random, count: int, least: int, most: int) -> Shape:
    """Draw one number for each dimension, half of the time the same for all."""
    if chance.random() < 0.5:
        return (chance.randint(least, most),) * count
    return tuple(chance.randint(least, most) for _ in range(count))


def mostly_one(chance: Random, count: int, most: int) -> Shape:
    """Draw one number from 1 to ``most`` for each dimension, half of the time 1 for all."""
    return (1,) * count if chance.random() < 0.5 else numbers(chance, count, 1, most)


def likely(chance: Random, probability: float = 0.5) -> bool:
    """Return whether something with this probability happens."""
    return chance.random() < probability


def divisor(chance: Random, *values: int) -> int:
    """Draw a number that divides all of ``values``."""
    return chance.choice([n for n in range(1, min(values) + 1) if all(v % n == 0 for v in values)])

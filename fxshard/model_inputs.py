"""A model's inputs as the command line takes them: ``--input 2x3x64x96 --input 2x7:int64 --split W``.

Plans need them empty, on any device; ranks that compute need numbers.  Nothing here imports torch before a command
runs.
"""

from __future__ import annotations

import argparse
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxshard.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

AXES = {3: "L", 4: "HW", 5: "DHW"}
"""The letters of the spatial dimensions, by the number of dimensions of an input."""
FLOATING = ("float32", "float64", "float16", "bfloat16")
BYTES = ("uint8", "bool")
DTYPES = (*FLOATING, *BYTES, "int64", "int32", "int16", "int8")
"""What an input may be; the first where nothing is said.  Floating ones and bytes can be split."""


@dataclass(frozen=True)
class ModelInput:
    """One positional argument of a model's forward.

    Args:
        sizes: Of the whole batch.
        dtype: One of :data:`DTYPES`.
    """

    sizes: tuple[int, ...]
    dtype: str = DTYPES[0]

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes)) + ("" if self.dtype == DTYPES[0] else f":{self.dtype}")

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of the shape and type, on ``device``."""
        import torch

        return torch.empty(self.sizes, dtype=getattr(torch, self.dtype), device=device)

    def drawn(self) -> torch.Tensor:
        """Return normal numbers in the default type where the type is a floating one; else zeros and ones."""
        import torch

        if self.dtype in FLOATING:
            return torch.randn(self.sizes)
        return torch.randint(0, 2, self.sizes).to(getattr(torch, self.dtype))


MOST_ELEMENTS = 2**59
"""Whose bytes can be counted, of complex numbers too."""


def model_input(text: str) -> ModelInput:
    """Return the input that is written as ``2x3x64x96`` or ``2x7:int64``.

    Raises:
        argparse.ArgumentTypeError: The sizes are none, or there is no such type.

    Example:
        >>> model_input("2x7:int64")
        ModelInput(sizes=(2, 7), dtype='int64')
    """
    shape, colon, dtype = text.partition(":")
    if colon and dtype not in DTYPES:
        msg = f"{text!r}: the type behind the colon is one of {', '.join(DTYPES)}"
        raise argparse.ArgumentTypeError(msg)
    return ModelInput(sizes(shape), dtype or DTYPES[0])


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of ``7x3x512x8192``.

    Raises:
        argparse.ArgumentTypeError: Something between the ``x`` is no size >= 1.
    """
    parts = text.lower().split("x")
    if not all(part.isdigit() for part in parts):
        msg = f"{text!r} is not of the form 7x3x512x8192"
        raise argparse.ArgumentTypeError(msg)
    found = tuple(positive(part) for part in parts)
    if math.prod(found) > MOST_ELEMENTS:
        msg = f"{text}: a tensor has no more than {MOST_ELEMENTS:.0e} elements"
        raise argparse.ArgumentTypeError(msg)
    return found


def positive(text: str) -> int:
    """Return the number, >= 1.

    Raises:
        argparse.ArgumentTypeError: It is less, or none.
    """
    try:
        value = int(text)
    except ValueError as error:
        msg = f"invalid number: {text!r}"
        raise argparse.ArgumentTypeError(msg) from error
    if value < 1:
        msg = f"must be at least 1, got {value}"
        raise argparse.ArgumentTypeError(msg)
    return value


def split_dims(letters: str, inputs: Sequence[ModelInput], axes: int) -> list[int]:
    """Return the dimensions that the letters name, one for each of the mesh's axes.

    Args:
        letters: What ``--split`` was given.
        inputs: The letters are those of the one with the most dimensions, of those that can be split.
        axes: How many axes the mesh has.

    Raises:
        PlanError: The input has no such dimension, or there are more or fewer letters than axes.

    Example:
        >>> image, labels = ModelInput((2, 3, 64, 96)), ModelInput((2, 7), "int64")
        >>> split_dims("HW", [image, labels], 2), split_dims("WxH", [image], 2), split_dims("w", [image], 1)
        ([2, 3], [3, 2], [3])
    """
    image = _image(inputs)
    known, asked = AXES.get(len(image.sizes), ""), letters.upper().replace("X", "")
    if not asked or any(letter not in known for letter in asked):
        msg = f"--split {letters}: an input of {image} has {_letters(known)}"
        batch = "; the batch is split in Python, with placements=[Shard(0)]" if set(asked) & {"N", "B"} else ""
        raise PlanError(msg + batch)
    if len(asked) != axes:
        mesh = "a mesh of 1 axis" if axes == 1 else f"a mesh of {axes} axes"
        msg = f"--split {letters} on {mesh}: one letter for each axis, as in {_example(known)}"
        raise PlanError(msg)
    return [known.index(letter) + 2 for letter in asked]


def _image(inputs: Sequence[ModelInput]) -> ModelInput:
    """Return the input with the most dimensions of the floating ones, else of bytes, else of all."""
    for dtypes in (FLOATING, BYTES):
        found = [given for given in inputs if given.dtype in dtypes and len(given.sizes) >= min(AXES)]
        if found:
            return max(found, key=lambda given: len(given.sizes))
    return max(inputs, key=lambda given: len(given.sizes))


def _letters(known: str) -> str:
    if not known:
        return f"no dimensions with letters, which are {', '.join(AXES.values())} with 3, 4 and 5 of them; leave it out"
    named = f"letters {', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else f"letter {known}"
    return f"the {named}, as in {_example(known)}"


def _example(known: str) -> str:
    several = f", or --split {known[-2:]} --mesh 2x2" if len(known) > 1 else ""
    return f"--split {known[-1]} --world-size 2{several}"


def check_call(model: nn.Module, inputs: Sequence[ModelInput]) -> None:
    """Check that a model's forward takes so many positional arguments.

    Raises:
        PlanError: It takes fewer, or needs more.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        times = "once" if len(inputs) == 1 else f"{len(inputs)} times"
        msg = f"forward{signature}: {error}; --input is given {times}, and one is needed for each argument, in order"
        raise PlanError(msg) from error

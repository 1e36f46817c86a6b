"""Inputs by shape and type, as the command line takes them."""

from __future__ import annotations

import pytest
import torch

from fxshard.errors import PlanError
from fxshard.model_inputs import DTYPES, ModelInput, model_input, split_dims
from fxshard.values import image_positions


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_has_the_type_that_is_named(dtype: str) -> None:
    given = model_input(f"2x300:{dtype}")
    assert model_input(str(given)) == given
    empty, drawn = given.empty(torch.device("meta")), given.drawn()
    assert (empty.shape, empty.dtype, empty.device.type) == ((2, 300), getattr(torch, dtype), "meta")
    if empty.is_floating_point():
        assert drawn.dtype == torch.float32  # a verification converts it to the type that it is about
        assert len(drawn.unique()) > 500
    else:
        assert drawn.dtype == empty.dtype
        assert drawn.unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("texts", "letters", "dims"),
    [
        (["2x3x8x8"], "W", [3]),
        (["2x3x8x8"], "wh", [3, 2]),
        (["2x7:int64", "2x3x8x8"], "H", [2]),
        (["2x3x8", "2x3x8x8x8"], "DHxW", [2, 3, 4]),
        (["2x3x8x8", "2x8x8x1x1:int64"], "W", [3]),
        (["2x7", "2x3x8x8:uint8"], "W", [3]),
        (["2x3x8", "2x3x8x8:uint8"], "L", [2]),
        (["2x3x8x8:int64"], "W", [3]),
    ],
)
def test_letters_are_those_of_the_image(texts: list[str], letters: str, dims: list[int]) -> None:
    inputs = [model_input(text) for text in texts]
    assert split_dims(letters, inputs, len(dims)) == dims
    images = image_positions([given.drawn() for given in inputs])  # the planner's choice
    assert all(max(dims) < len(inputs[i].sizes) for i in images)


@pytest.mark.parametrize(
    ("sizes", "letters", "axes", "said"),
    [
        (
            (2, 7),
            "W",
            1,
            "2x7 has no dimensions with letters, which are L, HW, DHW with 3, 4 and 5 of them",
        ),
        ((2, 3, 9), "W", 1, "an input of 2x3x9 has the letter L, as in --split L --world-size 2$"),
        (
            (2, 3, 9, 9, 9),
            "X",
            1,
            "the letters D, H and W, as in --split W --world-size 2, or --split HW --mesh 2x2",
        ),
        ((2, 3, 9, 9), "W", 2, "--split W on a mesh of 2 axes: one letter for each axis, as in"),
    ],
)
def test_other_letters_are_refused(sizes: tuple[int, ...], letters: str, axes: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        split_dims(letters, [ModelInput(sizes)], axes)

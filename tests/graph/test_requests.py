"""Requests that make no sense are refused in one sentence, before anything is captured."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import fxshard
from fxshard.devices import H200
from fxshard.errors import PlanError
from fxshard.models import UnknownModelError, build_named

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = "is not a number above 0"
ADDED = "is not a finite number, 0 or more"


class NeedsWidth(nn.Module):
    """A model that cannot be made without an argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def plan(**options: Any) -> fxshard.Plan:
    return fxshard.plan(nn.Conv2d(3, 4, 3), torch.empty(1, 3, 8, 8), world_size=2, **options)


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("single_flops", 0, NUMBER),
        ("bytes_per_s", math.nan, NUMBER),
        ("half_flops", "3", NUMBER),
        ("memory_gib", True, NUMBER),
        ("kernel_us", math.inf, ADDED),
        ("kernel_us", -1.0, ADDED),
    ],
)
def test_a_device_has_figures_to_reckon_with(figure: str, value: Any, text: str) -> None:
    with pytest.raises(PlanError, match=rf"Device\.{figure}=.* {text}"):
        dataclasses.replace(H200, **{figure: value})


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [("bytes_per_s", 0.0, NUMBER), ("exchange_us", math.nan, ADDED), ("reduce_us", -1e9, ADDED)],
)
def test_a_link_has_figures_to_reckon_with(figure: str, value: float, text: str) -> None:
    with pytest.raises(PlanError, match=rf"Link\.{figure}=.* {text}"):
        dataclasses.replace(H200.link, **{figure: value})


def test_a_link_without_waits_and_limits_is_one() -> None:
    fast = dataclasses.replace(H200.link, exchange_us=0, reduce_us=0, bytes_per_s=math.inf)
    assert plan(device=dataclasses.replace(H200, link=fast)).report.total.of("gather").messages == 1  # the output


@pytest.mark.parametrize("limit", [0, -1, math.nan, "3", True])
def test_a_limit_is_a_size(limit: Any) -> None:
    with pytest.raises(PlanError, match="is no size in GiB"):
        plan(memory_limit_gib=limit)


# what is asked for, and what it says
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a pattern that is a number": (
        lambda: plan(placements={"": [Shard(3)], 3: Replicate()}),
        PlanError,
        "placements has 3 for a module; patterns of paths are strings",
    ),
    "a function in place of a module": (
        lambda: fxshard.transform(torch.relu),  # type: ignore[type-var]
        PlanError,
        "takes a torch.nn.Module and was given a builtin_function_or_method",
    ),
    "a model with an argument": (
        lambda: build_named(f"{__name__}:NeedsWidth", num_classes=3),
        UnknownModelError,
        "cannot be made without arguments: missing a required argument: 'width'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused(what: str) -> None:
    call, kind, text = REFUSED[what]
    with pytest.raises(kind) as found:
        call()
    assert text in str(found.value)

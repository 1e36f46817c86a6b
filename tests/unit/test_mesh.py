"""What a mesh has to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import PlanError
from fxshard.mesh import _warn_alone, check_mesh


@dataclass
class Stub:
    """What is asked of a ``DeviceMesh``, which needs a process group."""

    ranks: Any
    coordinate: tuple[int, ...] | None = (0,)
    device_type: str = "cpu"

    @property
    def mesh(self) -> torch.Tensor:
        return torch.tensor(self.ranks)

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def check(stub: Any) -> None:
    check_mesh(stub)


@pytest.mark.parametrize("ranks", [[0], [2, 5, 6], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[[0, 4]], [[1, 5]]]], ids=str)
def test_ranks_that_ascend_along_each_axis_fit(ranks: Any) -> None:
    check(Stub(ranks))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1, 1], "has a rank more than once"),
        ([1, 0], r"the ranks \[1, 0\] of the mesh do not ascend .*; use \[0, 1\] in the shape \(2,\)"),
        ([[2, 3], [0, 1]], r"do not ascend .*; use \[0, 1, 2, 3\] in the shape \(2, 2\)"),
        ([[0, 1], [3, 2]], "do not ascend"),
    ],
    ids=str,
)
def test_other_ranks_are_refused(ranks: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(Stub(ranks))


@pytest.mark.parametrize(
    ("ranks", "world", "warned"), [([1], 2, True), ([[[1]]], 2, True), ([0, 1], 4, False), ([0], 1, False)]
)
def test_a_mesh_of_one_rank_of_several_is_a_warning_once(
    ranks: Any, world: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    _warn_alone.cache_clear()
    for _ in range(2):
        check(Stub(ranks))
    said = "the mesh has 1 rank of 2: rank 1 runs the whole model alone, and nothing is split; a mesh of all is "
    assert caplog.messages == [f"{said}init_device_mesh('cpu', (2,))"] * warned

"""What is said of one model on one mesh, and its form as one JSON line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import Shard

from tools.zoo.models import is_3d

if TYPE_CHECKING:
    from pathlib import Path

State: TypeAlias = Literal["exact", "own rounding", "differs", "fails", "not installed", "planned"]


@dataclass(frozen=True)
class Setting:
    """A mesh, what it splits, and the size of the images that are compared.

    Args:
        axes: What each mesh axis splits: letters of D, H and W.
        mesh: Ranks on each of them.
        size: Height and width in pixels.
    """

    axes: str
    mesh: tuple[int, ...]
    size: tuple[int, int]

    def placements(self, name: str) -> tuple[Shard, ...]:
        """Return one placement for each mesh axis, for the images of the model ``name``."""
        ndim = 5 if is_3d(name) else 4
        return tuple(Shard(ndim - 1 - "WHD".index(axis)) for axis in self.axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis}/{ranks}" for axis, ranks in zip(self.axes, self.mesh, strict=True))


@dataclass(frozen=True)
class Survey:
    """A plan at a realistic size, as one rank sees it.

    Args:
        size: Height and width in pixels.
        flops: Of convolutions and matrix products in the whole forward.
        split_share: The part of them that runs split, 0 to 1.
        gather_elements: The largest tensor that is gathered, the model's outputs apart.
        gather_module: Where.
        feature_map_elements: The largest value at the network's coarsest resolution.
        halo_bytes: Sent in halos in a step, forward and backward.
        reasons: Why something is gathered, and how often.
    """

    size: tuple[int, int]
    flops: int
    split_share: float
    gather_elements: int
    gather_module: str
    feature_map_elements: int
    halo_bytes: int
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What is said of one model on one mesh.

    Args:
        model: Its name.
        setting: The mesh and the size that was asked for.
        size: The height and width that the model took.
        state: ``"exact"`` to 1e-9; ``"own rounding"`` where the untouched model, each result moved by one unit in
            the last place, differs from itself as much; ``"differs"``; ``"fails"`` with an error;
            ``"not installed"``; ``"planned"`` where only its plan was made.
        error: The largest relative error.
        own_error: The untouched model's, where it was asked for.
        note: The difference or the error message.
        survey: Of the plan, where it was made.
        seconds: How long all took.
        torch_version: What it ran on.
    """

    model: str
    setting: Setting
    size: tuple[int, int]
    state: State
    error: float = 0.0
    own_error: float | None = None
    note: str = ""
    survey: Survey | None = None
    seconds: float = 0.0
    torch_version: str = torch.__version__

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the model's result."""
        return self.state in ("exact", "own rounding", "not installed", "planned")

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def from_json(line: str) -> Verdict:
    """Return the verdict of one line of JSON."""
    table: dict[str, Any] = json.loads(line)
    setting, survey = table.pop("setting"), table.pop("survey")
    table["size"] = tuple(table["size"])
    return Verdict(
        setting=Setting(setting["axes"], tuple(setting["mesh"]), tuple(setting["size"])),
        survey=None if survey is None else Survey(**survey | {"size": tuple(survey["size"])}),
        **table,
    )


def read(files: list[Path]) -> list[Verdict]:
    """Return the verdicts of JSON-lines files; of what is there twice for a model and mesh, the last."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines() if line.strip()]
    verdicts = map(from_json, lines)
    return list({(v.model, v.setting.axes, v.setting.mesh, v.state == "planned"): v for v in verdicts}.values())

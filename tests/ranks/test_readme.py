"""The README's programs run as they are written there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard.workers import mesh
from tests.ranks.torchrun import said_by_each_rank

if TYPE_CHECKING:
    from fxshard.workers import RankPool

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MARKS = ("import timm", 'backend="fxshard"', "my_columns", "DistributedDataParallel", "fully_shard")
"""What tells each program; all of them run here."""


def program_with(text: str) -> str:
    (found,) = (program for program in PROGRAMS if text in program)
    return str(found)


@pytest.mark.slow
def test_the_training_script_runs_on_two_cpu_ranks(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    (tmp_path / "train.py").write_text(program_with("import timm"))
    said = [" ".join(lines).split() for lines in said_by_each_rank(Path("train.py"), 2, tmp_path)]
    assert sorted(words[0] for words in said) == ["0", "1"]
    first, second = (words[1::2] for words in said)
    assert len(first) == 3
    assert first == second
    assert "head.fc.weight" in torch.load(tmp_path / "net.pt")


def combined(rank: int, program: str) -> float:
    """Run the README's lines on images of each row's own; return the largest relative error of a gradient."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net, reference = (nn.Conv2d(3, 4, 5, padding=2).double() for _ in range(2))
    reference.load_state_dict(net.state_dict())
    images = torch.randn(2, 3, 8, 16, dtype=torch.float64)
    reference(images).square().mean().backward()
    names: dict[str, Any] = {
        "fxshard": SimpleNamespace(transform=functools.partial(fxshard.transform, inner_backend="eager")),
        "init_device_mesh": init_device_mesh,
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
        "Shard": Shard,
        "device": "cpu",
        "net": net,
    }
    exec(program, names)
    row = names["mesh"].get_local_rank("data")
    names["net"](images[row : row + 1]).square().mean().backward()
    errors = []
    for p, q in zip(names["net"].parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        errors.append(float((whole - q.grad).abs().max() / q.grad.abs().max()))
    return max(errors)


def test_what_goes_around_a_model_goes_around_a_transformed_one(pool: RankPool) -> None:
    with_ddp, fsdp = program_with("DistributedDataParallel"), program_with("fully_shard")
    with_fsdp = "".join(line for line in with_ddp.splitlines(True) if "DistributedDataParallel" not in line) + fsdp
    for program in (with_ddp, with_fsdp):
        assert max(pool.run(combined, program, ranks=4)) < 1e-9


def compiled(rank: int, program: str) -> float:
    """Run the README's lines in this rank; return how far its output is from one device's."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net, images = nn.Conv2d(3, 4, 5, padding=2).double(), torch.randn(2, 3, 8, 16, dtype=torch.float64)
    expected = net(images)
    names: dict[str, Any] = {"torch": torch, "Shard": Shard, "mesh": mesh((2,)), "net": net, "backend": "eager"}
    exec(program, names)
    return float((names["net"](images) - expected).abs().max())


def test_the_backend_is_found_by_its_name(pool: RankPool) -> None:
    assert max(pool.run(compiled, program_with('backend="fxshard"'), ranks=2)) < 1e-9


def local_loss(rank: int, program: str) -> float:
    """Run the README's lines in this rank; return the largest relative error of a gradient."""
    torch.manual_seed(0)
    net, reference = (nn.Conv2d(3, 4, 5, padding=2).double() for _ in range(2))
    reference.load_state_dict(net.state_dict())
    images, labels = torch.randn(2, 3, 8, 16, dtype=torch.float64), torch.randint(4, (2, 8, 16))
    nn.functional.cross_entropy(reference(images), labels).backward()
    eager = SimpleNamespace(transform=functools.partial(fxshard.transform, inner_backend="eager"))
    parts = {"my_columns": images.chunk(2, 3)[rank], "my_labels": labels.chunk(2, 2)[rank]}
    exec(
        program,
        {"torch": torch, "fxshard": eager, "DTensor": DTensor, "Shard": Shard, "mesh": mesh((2,)), "net": net} | parts,
    )
    errors = []
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        errors.append(float((p.grad - q.grad).abs().max() / q.grad.abs().max()))
    return max(errors)


def test_the_loss_of_a_split_map_is_the_whole_s(pool: RankPool) -> None:
    assert max(pool.run(local_loss, program_with("my_labels"), ranks=2)) < 1e-9

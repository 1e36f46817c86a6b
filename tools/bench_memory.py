"""Compares the memory that a plan predicts with what GPUs need, on one GPU and split over several.

    torchrun --nproc-per-node 2 tools/bench_memory.py --json benchmarks/memory_h200x2.json
    python tools/bench_memory.py --alone 2 --json benchmarks/memory_alone_h200.json

The second form needs one GPU: it runs the graph of one rank of so many on a process group that communicates nothing,
and keeps what that rank keeps, without NCCL's own buffers.

Each row is one training step after warm-up: ``torch.cuda.max_memory_allocated`` of rank 0 and ``Plan.memory.peak``, in
GiB.  A library that is not installed leaves its models out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.rank_process import take_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@dataclass(frozen=True)
class Row:
    """What is trained for a step.

    Args:
        name: Of the row.
        build: Makes the model.
        shape: Of the whole input; the last dimension is split.
        dtype: "fp32", or "bf16" for autocast.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: str = "fp32"

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context that the model runs in."""
        return torch.autocast("cuda", torch.bfloat16) if self.dtype == "bf16" else nullcontext()


def _from(module: str, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    made: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return made


SMALL = partial(_from, "timm", "create_model", "convnext_small", drop_path_rate=0.4)


def _checkpointed() -> nn.Module:
    model: Any = SMALL()
    model.set_grad_checkpointing(True)
    made: nn.Module = model
    return made


class UNet3D(nn.Module):
    """Three levels, batch norms, transposed convolutions on the way up (Cicek et al., 2016)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(_block(i, o) for i, o in zip((1, *sizes), sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(o, i, 2, 2) for i, o in itertools.pairwise(sizes))
        self.join = nn.ModuleList(_block(2 * i, i) for i in sizes[:-1])
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (N, 2, D, H, W)."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([kept[level], self.up[level](x)], 1))
        logits: torch.Tensor = self.head(x)
        return logits


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in (inputs, outputs):
        layers += [nn.Conv3d(i, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


RESNET = partial(_from, "torchvision.models", "resnet50")
LARGE = partial(_from, "timm", "create_model", "convnext_xlarge", drop_path_rate=0.4)
ROWS = (
    Row("convnext_xlarge", LARGE, (7, 3, 512, 1024)),
    Row("convnext_xlarge", LARGE, (7, 3, 512, 1024), "bf16"),
    Row("resnet50", RESNET, (4, 3, 1088, 1920)),
    Row("resnet50", RESNET, (4, 3, 1088, 1920), "bf16"),
    Row("U-Net 3-D", UNet3D, (1, 1, 128, 128, 256)),
    Row("convnext_small", SMALL, (4, 3, 512, 2048)),
    Row("convnext_small checkpointed", _checkpointed, (4, 3, 512, 2048)),
)


def measured_gib(row: Row, transformed: Callable[[nn.Module], nn.Module]) -> float:
    """Return the peak of a training step."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.manual_seed(0)  # the same on every rank
    model, image = row.build().cuda().train(), torch.randn(row.shape, device="cuda")
    net = transformed(model)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with row.precision():
            loss = net(image).float().square().mean()
        loss.backward()
    return torch.cuda.max_memory_allocated() / 2**30


def predicted_gib(row: Row, ranks: int, backend: str, budget: float) -> float:
    """Return the peak that a plan predicts."""
    torch.compiler.reset()
    model, image = row.build().cuda().train(), torch.empty(row.shape, device="cuda")
    with row.precision():
        placements = [Shard(len(row.shape) - 1)]
        plan = fxshard.plan(
            model, image, world_size=ranks, placements=placements, inner_backend=backend, memory_budget=budget
        )
    return plan.memory.peak.bytes / 2**30


def _compiled(model: nn.Module, backend: str, budget: float) -> nn.Module:
    functorch_config.activation_memory_budget = budget
    model.compile(backend=backend, dynamic=False)
    return model


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was measured and predicted, row by row."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("w",))
    for row in ROWS:
        if args.only and not any(name in row.name for name in args.only):
            continue
        placements = [Shard(len(row.shape) - 1)]
        options = {"inner_backend": args.backend, "memory_budget": args.memory_budget}
        split = partial(fxshard.transform, mesh=mesh, placements=placements, **options)
        one = partial(_compiled, backend=args.backend, budget=args.memory_budget)
        for ranks, change in ((1, one), (world, split)):
            try:
                found = measured_gib(row, change)
                expected = predicted_gib(row, ranks, args.backend, args.memory_budget)
            except ModuleNotFoundError as error:
                print(f"left out: {row.name}: {error}", file=sys.stderr)
                break
            yield {
                "model": row.name,
                "shape": row.shape,
                "dtype": row.dtype,
                "inner_backend": args.backend,
                "memory_budget": args.memory_budget,
                "ranks": ranks,
                "communicates": ranks > 1 and not args.alone,
                "measured_gib": round(found, 3),
                "predicted_gib": round(expected, 3),
                "error": round(expected / found - 1, 4),
            }


def start(alone: int | None) -> None:
    """Start the process group: torchrun's, or one that communicates nothing, as the rank that a plan is for."""
    if alone:
        dist.init_process_group("fake", store=FakeStore(), rank=alone // 2, world_size=alone)
        torch.cuda.set_device(0)
    else:
        take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")


def main() -> int:
    """Run every row; rank 0 prints them and writes the file as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="as fxshard.transform takes it")
    parser.add_argument("--only", nargs="+", help="rows whose name has one of these")
    parser.add_argument("--alone", type=int, metavar="N", help="run one of N ranks, without communication")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start(args.alone)
    launcher = "python" if args.alone else f"torchrun --nproc-per-node {dist.get_world_size()}"
    about = {
        "command": f"{launcher} {' '.join(sys.argv)}",
        "device": f"{1 if args.alone else dist.get_world_size()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "fxshard": fxshard.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = []
    for row in results(args):
        rows.append(row)
        if args.alone or dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Times and measures one training step of ConvNeXt-XL, on one GPU and split over several.

    torchrun --nproc-per-node 2 tools/bench_convnext.py --json benchmarks/convnext_xl_h200x2.json
    python tools/bench_convnext.py --alone 2 --json benchmarks/convnext_xl_alone.json

The second form needs one GPU: it runs rank 0's graph of so many ranks on a process group that communicates nothing.
Its results are wrong at the borders; its time is what a rank computes, its memory what a rank keeps.

For each configuration: median milliseconds of forward + backward, how long the host needs to launch it and the GPU
works on it, peak GiB of a rank, and the relative difference of the loss and of the parameter gradients from eager mode
on one GPU with the same weights, input and seed; and the loss of the last step, which is the same in every mode.
Inductor draws random numbers as eager mode does (``fallback_random``), as fxshard always does: with its own,
drop path drops other samples and there is nothing to compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.rank_process import take_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnext_xlarge", help="timm name")
    parser.add_argument("--batch", type=int, default=7)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=2048, help="of the whole image")
    parser.add_argument("--drop-path", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--backends", nargs="+", default=["aot_eager", "inductor"])
    parser.add_argument("--modes", nargs="+", default=["default"], help="of Inductor")
    parser.add_argument("--kernels", action="store_true", help="run fxshard's own kernels, too")
    parser.add_argument("--alone", type=int, metavar="N", help="run one of N ranks, without communication")
    parser.add_argument("--reference-width", type=int, help="of the one-GPU runs; default: the whole image")
    parser.add_argument("--no-reference", action="store_true", help="skip one GPU in eager mode, and comparing with it")
    parser.add_argument("--no-one", action="store_true", help="skip one GPU, compiled")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def build(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    model: torch.nn.Module = timm.create_model(args.model, drop_path_rate=args.drop_path)
    return model.cuda().train()


def step(model: torch.nn.Module, image: torch.Tensor, dtype: str) -> torch.Tensor:
    """Run forward and backward; return the loss."""
    context = torch.autocast("cuda", torch.bfloat16) if dtype == "bf16" else nullcontext()
    with context:
        loss: torch.Tensor = model(image).float().square().mean()
    loss.backward()
    return loss.detach()


def measure(model: torch.nn.Module, image: torch.Tensor, dtype: str, steps: int) -> dict[str, Any]:
    """Return the first step's loss and gradients, then the median time and the peak memory."""
    started = time.perf_counter()
    torch.manual_seed(1)
    loss = step(model, image, dtype)
    gradients = {n: p.grad.detach().cpu() for n, p in model.named_parameters() if p.grad is not None}
    compile_s = time.perf_counter() - started
    for _ in range(3):
        model.zero_grad(set_to_none=True)  # CUDA graphs write to the same gradients again
        step(model, image, dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        last = step(model, image, dtype)
        end.record()
        host.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": round(statistics.median(times), 2),
        "host_ms": round(statistics.median(host), 2),
        "gpu_ms": round(busy_ms(model, image, dtype), 2),
        "last_loss": float(last),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(compile_s, 1),
        "loss": float(loss),
        "gradients": gradients,
    }


def busy_ms(model: torch.nn.Module, image: torch.Tensor, dtype: str) -> float:
    """Return how long the GPU works in a step, in milliseconds: the sum of its kernels and copies."""
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, image, dtype)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages())) / 1e3


def difference(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the relative differences of loss and gradients; all gradients as one vector, and the worst one."""
    total = error = 0.0
    worst = 0.0
    largest = max(float(g.abs().max()) for g in reference["gradients"].values())
    for name, gradient in reference["gradients"].items():
        away = (other["gradients"][name].double() - gradient.double()).flatten()
        error += float(away.square().sum())
        total += float(gradient.double().square().sum())
        worst = max(worst, float(away.abs().max()) / max(float(gradient.abs().max()), 1e-4 * largest))
    return {
        "loss": abs(other["loss"] - reference["loss"]) / abs(reference["loss"]),
        "gradients_l2": (error / total) ** 0.5,
        "worst_gradient_max": worst,
    }


def free() -> None:
    """Drop compiled code and cached memory of the run before."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def start(alone: int | None) -> None:
    """Start the process group: torchrun's, or one that communicates nothing."""
    if alone:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=alone)
    else:
        take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")


def configurations(args: argparse.Namespace, image: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield one row of results for each configuration."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("w",))
    width = args.reference_width or args.width
    part = image[..., :width].contiguous()
    for dtype in args.dtypes:
        reference = None
        if not args.no_reference:
            reference = measure(build(args), part, dtype, args.steps)
            yield row("1 GPU eager", dtype, width, reference)
            free()
        for backend, mode in [(b, m) for b in args.backends for m in (args.modes if b == "inductor" else ["default"])]:
            called = backend if mode == "default" else f"{backend} {mode}"
            if not args.no_one:
                model = build(args)
                model.compile(backend=backend, mode=mode if backend == "inductor" else None, dynamic=False)
                yield row(f"1 GPU {called}", dtype, width, measure(model, part, dtype, args.steps), reference)
                del model
                free()
            options = {"inner_backend": backend, "kernels": args.kernels, "mode": mode}
            model = fxshard.transform(build(args), mesh=mesh, placements=[Shard(3)], **options)
            name = f"1 of {world} ranks, no communication" if args.alone else f"{world} GPUs"
            comparable = None if args.alone or width != args.width else reference
            found = measure(model, image, dtype, args.steps)
            yield row(f"{name}, fxshard {called}{', own kernels' * args.kernels}", dtype, args.width, found, comparable)
            del model
            free()


def row(
    name: str, dtype: str, width: int, found: dict[str, Any], reference: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a measurement with its name, without the gradients but with how far they are from the reference's."""
    shown = {k: v for k, v in found.items() if k != "gradients"}
    more = {} if reference is None else {"difference": difference(reference, found)}
    return {"configuration": name, "dtype": dtype, "width": width, **shown, **more}


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was run, on what."""
    launcher = "python" if args.alone else f"torchrun --nproc-per-node {dist.get_world_size()}"
    return {
        "command": f"{launcher} {' '.join(sys.argv)}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "fxshard": fxshard.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "input": [args.batch, 3, args.height, args.width],
        "model": args.model,
        "drop_path": args.drop_path,
        "fallback_random": True,
    }


def main() -> int:
    """Run every configuration and write the JSON file on rank 0 as results come."""
    args = parse()
    inductor_config.fallback_random = True
    start(args.alone)
    image = torch.randn(args.batch, 3, args.height, args.width, generator=torch.Generator().manual_seed(2)).cuda()
    results: list[dict[str, Any]] = []
    for found in configurations(args, image):
        results.append(found)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
            if args.json:
                args.json.parent.mkdir(exist_ok=True)
                args.json.write_text(json.dumps({"about": about(args), "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

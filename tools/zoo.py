"""Runs models of torchvision and timm against themselves, split over ranks, and writes ``docs/coverage.md``.

    python tools/zoo.py                                  every model of the lists below
    python tools/zoo.py --models torchvision:resnet18 timm:convnext_atto --dims 2 --ranks 3

For each model one training step in float64 on gloo ranks is compared with the untouched model on one device:
outputs, input gradient, parameter gradients, buffers and generator state.  The table says whether all are
equal to 1e-9, which share of the FLOPs (convolutions and matrix products) runs split, what one rank sends in halos,
and why something is gathered.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import fx, nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fxshard import backend
from fxshard.compare import Case, compare_on_rank
from fxshard.report import describe
from fxshard.values import plan_of
from fxshard.workers import RankPool, WorkerError

SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
TORCHVISION = """
    alexnet vgg11 vgg11_bn resnet18 resnet34 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 squeezenet1_0
    squeezenet1_1 googlenet inception_v3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large mnasnet0_5 mnasnet1_0
    shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 efficientnet_b1 efficientnet_v2_s regnet_y_400mf
    regnet_x_400mf regnet_y_800mf convnext_tiny
""".split()
TIMM = """
    convnext_atto convnextv2_atto resnet10t resnet18d resnet26t seresnext26d_32x4d ecaresnet26t skresnet18
    res2net50_14w_8s resnest14d resnetv2_50 resnetaa50 resnetblur18 gernet_s darknet17 cspresnet50 cspdarknet53
    cs3darknet_s dla34 dpn48b densenet121 efficientnet_lite0 tf_efficientnet_b0 tf_efficientnetv2_b0 mixnet_s
    mnasnet_small mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035 fbnetc_100 spnasnet_100
    tinynet_e hardcorenas_a ghostnet_050 ghostnetv2_100 lcnet_035 regnetx_002 regnety_002 regnetz_005 repvgg_a0
    repghostnet_050 rexnetr_200 nf_regnet_b0 nf_resnet26 eca_nfnet_l0 dm_nfnet_f0 selecsls42 hardcorenas_b
    hrnet_w18_small vovnet39a ese_vovnet19b_dw tresnet_m inception_v3 inception_next_atto xception41
    legacy_xception poolformer_s12 rdnet_tiny starnet_s1 fastvit_t8 mobileone_s0 hgnet_tiny hgnetv2_b0
    edgenext_xx_small coatnet_nano_rw_224 maxvit_pico_rw_256 convmixer_768_32
""".split()
MODELS = (
    *(f"torchvision:{name}" for name in TORCHVISION),
    *(f"segmentation:{name}" for name in SEGMENTATION),
    *(f"timm:{name}" for name in TIMM),
)
SIZES = {
    "timm:coatnet_nano_rw_224": (224, 224),
    "timm:maxvit_pico_rw_256": (256, 256),
    "torchvision:inception_v3": (96, 128),
}
"""Height and width of models that do not take any."""


@dataclass(frozen=True)
class Result:
    """What one rank says of one model.

    Args:
        model: Its name.
        exact: Whether all is equal to 1e-9.
        sharded: Share of the FLOPs that run split, 0 to 1.
        halo_bytes: Sent in halos in a step, forward and backward.
        reasons: Why something is gathered, and how often.
        note: The difference or the error.
    """

    model: str
    exact: bool
    sharded: float
    halo_bytes: int
    reasons: dict[str, int]
    note: str = ""


def build(name: str, size: tuple[int, int]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return the model with few classes and random weights, and an image."""
    source, _, model = name.partition(":")
    height, width = SIZES.get(name, size)
    if source == "timm":
        made = timm.create_model(model, num_classes=7)
    else:
        models = torchvision.models.segmentation if source == "segmentation" else torchvision.models
        extra: dict[str, Any] = {"weights_backbone": None} if source == "segmentation" else {}
        extra |= {"aux_logits": False, "init_weights": False} if model in ("googlenet", "inception_v3") else {}
        made = getattr(models, model)(weights=None, num_classes=7, **extra)
    return made, (torch.randn(2, 3, height, width),)


def split_share(graph: fx.GraphModule) -> float:
    """Return the share of the global graph's FLOPs whose node is split on some axis."""
    total = split = 0
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        mode = next((a.fake_mode for a in tree_leaves(args) if hasattr(a, "fake_mode")), None)
        if mode is None:
            continue
        with mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
        found = plan_of(node)
        total += counter.get_total_flops()
        split += counter.get_total_flops() if found and found.sharded_axes else 0
    return split / total if total else 1.0


def judge(rank: int, name: str, case: Case) -> Result:
    """Compare one model on this rank (runs in a rank process)."""
    seen: list[tuple[float, int, dict[str, int]]] = []

    def observe(planned: fx.GraphModule, local: fx.GraphModule, config: Any) -> None:
        report = describe(planned, local, config)
        seen.append((split_share(planned) if rank == 0 else 0.0, report.total.of("halo").bytes, report.reasons))

    backend.on_compiled.append(observe)
    try:
        difference = compare_on_rank(rank, case)
    finally:
        backend.on_compiled.remove(observe)
    share, halo, reasons = seen[0] if seen else (0.0, 0, {})
    return Result(name, difference.exact(), share, halo, reasons, "" if difference.exact() else str(difference))


def run(pool: RankPool, name: str, args: argparse.Namespace) -> Result:
    """Return rank 0's result, or the first rank's that differs."""
    mesh = (2, 2) if len(args.dims) == 2 else (args.ranks,)
    placements = tuple(Shard(d) for d in args.dims)
    case = Case(functools.partial(build, name, (args.height, args.width)), placements, mesh, steps=1)
    try:
        results: list[Result] = pool.run(judge, name, case, ranks=math.prod(mesh), timeout_s=600)
    except WorkerError as error:
        cause = next(iter(error.causes.values()), None)
        return Result(
            name, False, 0.0, 0, {}, f"{cause.type_name}: {cause.message[-500:]}" if cause else str(error)[-500:]
        )
    wrong = [r for r in results if not r.exact]
    return wrong[0] if wrong else results[0]


def page(results: list[Result], args: argparse.Namespace) -> str:
    """Return the coverage page."""
    lines = [
        "# Coverage",
        "",
        f"Written by `python {' '.join(sys.argv)}` on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}.",
        "One training step in float64, dims " + ", ".join(map(str, args.dims)) + " split, against the untouched model.",
        "",
        f"{sum(r.exact for r in results)} of {len(results)} models are exact (1e-9).",
        "",
        "| model | exact | FLOPs split | halo KB a step | gathered because |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        why = "; ".join(f"{reason} ({count})" for reason, count in r.reasons.items()) or "-"
        why = r.note.replace("\n", " ").replace("|", "/")[:300] if not r.exact else why
        lines.append(
            f"| {r.model} | {'yes' if r.exact else 'NO'} | {r.sharded:.1%} | {r.halo_bytes / 1e3:.1f} | {why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the models; exit status 1 if one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--dims", nargs="+", type=int, default=[3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--page", type=Path, help="write the table here, such as docs/coverage.md")
    args = parser.parse_args()
    results = []
    with RankPool(4 if len(args.dims) == 2 else max(args.ranks, 2)) as pool:
        for name in args.models:
            start = time.perf_counter()
            results.append(run(pool, name, args))
            shown = asdict(results[-1]) | {"seconds": round(time.perf_counter() - start, 1)}
            print(json.dumps(shown), flush=True)
    if args.page:
        args.page.parent.mkdir(exist_ok=True)
        args.page.write_text(page(results, args))
    return 0 if all(r.exact for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs models of four libraries against themselves, split over ranks, and writes ``docs/coverage.md``.

    python -m tools.zoo --jobs 7 --json w.jsonl                              every model, 2 ranks over W
    python -m tools.zoo --subset --split H --ranks 3 --height 167 --width 96 --only check --json h.jsonl
    python -m tools.zoo --subset --split HW --ranks 2 2 --height 128 --only check --json hw.jsonl
    python -m tools.zoo --page docs/coverage.md --from w.jsonl h.jsonl hw.jsonl
    python -m tools.zoo --models torchvision:resnet18 timm:convnext_atto

For each model one training step in float64 on gloo ranks is compared with the untouched model on one device:
outputs, input gradient, parameter gradients, buffers and generator state.  Its plan is then made for images of
512 x 1024: which share of the FLOPs (convolutions and matrix products) runs split, the largest gather, what one rank
sends in halos, and why something is gathered.  A results file is one JSON line a model; with ``--resume`` the models
in it are left out.  The exit status is 1 where a model differs or cannot run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.zoo.models import HUGE, MODELS, SUBSET
from tools.zoo.page import page
from tools.zoo.schedule import Plan, run_all
from tools.zoo.verdict import Setting, Verdict, read


def main() -> int:
    """Run the models, or write the page from results."""
    args = _arguments()
    verdicts = read(args.sources) if args.sources else _run(args)
    if args.page:
        args.page.parent.mkdir(exist_ok=True)
        args.page.write_text(page(verdicts, args.sources or ()))
    wrong = [v for v in verdicts if not v.good]
    print(f"{len(verdicts) - len(wrong)} of {len(verdicts)} are good", *(f"\n  {v.model}: {v.state}" for v in wrong))
    return 1 if wrong else 0


def _run(args: argparse.Namespace) -> list[Verdict]:
    setting = Setting(args.split, tuple(args.ranks), (args.height, args.width))
    known = read([args.json]) if args.resume and args.json else []
    known = [v for v in known if (v.setting.axes, v.setting.mesh) == (setting.axes, setting.mesh)]
    names = [name for name in args.models if name not in {v.model for v in known}]
    if args.json and not args.resume:
        args.json.write_text("")
    found = []
    plan = Plan(setting, args.only != "plan", args.only != "check", args.timeout)
    for verdict in run_all(names, plan, jobs=args.jobs):
        found.append(verdict)
        print(_line(verdict, len(found), len(names)), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(verdict.to_json() + "\n")
    return [*known, *found]


def _line(verdict: Verdict, number: int, count: int) -> str:
    about = verdict.survey
    line = f"[{number}/{count}] {verdict.model:<45} {verdict.state:<13} {verdict.error:.1e} {verdict.seconds:>6.1f} s"
    if about:
        line += f"  {about.split_share:.2%} split, gather {about.gather_elements} / {about.feature_map_elements}"
    return f"{line}\n{verdict.note}" if verdict.note else line


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="names such as timm:resnet18d, or sources such as smp")
    parser.add_argument("--subset", action="store_true", help="one model of each kind of layer")
    parser.add_argument("--huge", action="store_true", help="with those of more than 150 M parameters")
    parser.add_argument("--split", default="W", help="what each mesh axis splits, such as W or HW")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="on each mesh axis")
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=1, help="pools of ranks at a time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for a model")
    parser.add_argument("--only", choices=("check", "plan"), help="only the comparison, or only the plan")
    parser.add_argument("--json", type=Path, help="write the results here, one line a model, as they come")
    parser.add_argument("--resume", action="store_true", help="leave out the models that are in the --json file")
    parser.add_argument("--page", type=Path, help="write the page here, such as docs/coverage.md")
    parser.add_argument("--from", dest="sources", nargs="+", type=Path, help="results to write the page from")
    args = parser.parse_args()
    if len(args.split) != len(args.ranks) or not set(args.split) <= set("DHW"):
        parser.error("--split takes one letter of D, H, W for each number of --ranks")
    args.models = _chosen(args)
    return args


def _chosen(args: argparse.Namespace) -> list[str]:
    if args.models:
        named = [m for m in args.models if ":" in m]
        return named + [m for m in MODELS if m.partition(":")[0] in args.models and (args.huge or m not in HUGE)]
    if args.subset:
        return list(SUBSET)
    return [m for m in MODELS if args.huge or m not in HUGE]


if __name__ == "__main__":
    sys.exit(main())

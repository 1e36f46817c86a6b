"""How the tests run the commands of README and the pages of ``docs``: as they are, smaller, at night, or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pages import Command

WHO = {
    ".ci/run makes an environment and installs the package with its extras": (
        "python -m venv .venv",
        "python3.11 -m venv .venv",
        ". .venv/bin/activate",
        'pip install -e ".[demo]"',
        'pip install -e ".[docs]"',
        'pip install -e ".[test]"',
        'pip install -e ".[test,dev,docs]"',
        "pip install .",
        "pip install -e . --config-settings editable_mode=compat",
    ),
    ".ci/run runs the tools that it hooks in": ("pre-commit install",),
    ".ci/run runs the tests": ("pytest", "pytest tests/unit", "pytest tests/graph", "pytest tests/ranks"),
    ".ci/run installs it": ("pip install shtab",),
    ".ci/run runs it": ("python tools/smoke_package.py",),
    ".ci/run builds the site": ("mkdocs build --strict", "mkdocs serve"),
    "they run this": (".ci/run", "pytest -m nightly"),
    "tests/unit/test_operators_page.py compares what it writes": ("python tools/list_operators.py",),
    "tests/ranks/test_operators.py draws fewer": ("python tools/sweep_operators.py --count 5000 --seed 7",),
    "tests/ranks/test_readme.py runs README's": ("torchrun --nproc-per-node 2 train.py",),
    "tests/ranks/test_demo.py runs it with two ranks": ("torchrun --nproc-per-node 8 -m fxshard demo",),
    "tests/graph/test_drawn_files.py reads plan.dot": ("dot -Tpdf plan.dot -o plan.pdf",),
    "tests/graph/test_strategies.py compares smaller models": ("python -m tools.compare_strategies",),
    "tests/ranks/test_bench.py times a smaller model": (
        "fxshard bench timm:convnext_atto --input 2x3x64x128 --world-size 2 --split W --inner-backend aot_eager",
    ),
    "tests/ranks/test_bench.py calibrates and plans": (
        "fxshard bench --calibrate --world-size 2 --json mine.json",
        "fxshard plan torchvision:resnet18 --input 2x3x224x448 --world-size 4 --split W --device mine.json",
    ),
    "nobody: it times": ("python tools/bench_plan.py",),
    "nobody: hours, and other libraries": (
        "python -m tools.zoo --jobs 4 --json results.jsonl",
        "python -m tools.zoo --page docs/coverage.md --from w.jsonl h.jsonl hw.jsonl",
    ),
    "nobody: npm and the network": ("python tools/vendor_dagre.py",),
    "nobody: two GPUs": (
        "torchrun --nproc-per-node 2 tools/bench_convnext.py --dtypes bf16 --backends inductor",
        "torchrun --nproc-per-node 2 tools/bench_memory.py",
    ),
}
ELSEWHERE = {command: who for who, commands in WHO.items() for command in commands}
"""Commands that ``tests/ranks/test_pages.py`` does not run, and who does, or why nobody."""

NET = "tests.drawn:Net --input 2x3x24x64"
SMALLER = {
    "fxshard plan torchvision:resnet18 --input 2x3x224x448 --world-size 4": (
        f"fxshard plan {NET} --world-size 4 --explain stages.0.conv1 --save plan.json plan.py plan.dot plan.graphml"
    ),
    "fxshard plan torchvision:resnet18 --input 2x3x64x256 --world-size 4": f"fxshard plan {NET} --world-size 4",
    "fxshard plan torchvision:resnet18 --input 2x3x64x256 --world-size 4 --explain layer4.1.conv2": (
        f"fxshard plan {NET} --world-size 4 --explain stages.0"
    ),
    "fxshard plan torchvision:resnet18 --input 2x3x224x448 --world-size 4 --split W --device h200": (
        f"fxshard plan {NET} --world-size 4 --split W --device h200 --memory-limit-gib 80"
    ),
    (
        "fxshard plan torchvision:resnet18 --input 2x3x224x448 --world-size 4 --split W --device h200 "
        "--explain layer4.1.conv1"
    ): (f"fxshard plan {NET} --world-size 4 --split W --device h200 --explain stages.0.conv1"),
    "fxshard plan torchvision:resnet18 --input 2x3x128x128 --mesh 2x2 --split HW": (
        f"fxshard plan {NET} --mesh 2x2 --split HW"
    ),
    "fxshard plan timm:convnext_xlarge --input 7x3x512x2048 --world-size 2 --memory": (
        f"fxshard plan {NET} --world-size 2 --memory --inner-backend aot_eager"
    ),
    "fxshard draw timm:convnext_atto --input 2x3x64x256 --world-size 4 --out plan.html plan.svg": (
        f"fxshard draw {NET} --world-size 4 --no-memory --out plan.html plan.svg"
    ),
    "fxshard draw torchvision:resnet18 --input 2x3x224x448 --mesh 2x2 --split HW --stage local --out rank.html": (
        f"fxshard draw {NET} --mesh 2x2 --split HW --stage local --no-memory --out rank.html"
    ),
}
"""What is run for every change in the place of what takes longer; nothing that it prints is compared then."""
AT_NIGHT = {
    "fxshard demo": "tests/ranks/test_demo.py runs it on smaller images",
    "fxshard demo --model torchvision:resnet18 --width 1024 --world-size 4 --split HW": "as the one before",
    "fxshard verify torchvision:resnet18 --input 2x3x64x97 --world-size 3 --split W": "docs/first-hour.md has one",
}
"""Commands that are run at night only."""
FILES = {
    "README.md": {"unet.py": "from torch import nn\ndef UNet(): return nn.Conv2d(3, 2, 3, padding=1)\n"},
}
"""Files that a page takes for granted."""
PLACEHOLDERS = {"MODEL": "module:function", "SHAPE": "1x3x8x16", "N": "2"}
"""Words that a reader fills in."""


def has_placeholders(command: Command) -> bool:
    """Return whether a command is a form to fill in."""
    return any(word in ("...", *PLACEHOLDERS) for word in command.text.split())


def is_followed(command: Command) -> bool:
    """Return whether a command is for the reader of a page to run, and none of those that run elsewhere."""
    return command.text not in ELSEWHERE and not has_placeholders(command)

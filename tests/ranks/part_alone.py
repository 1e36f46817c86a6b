"""Runs what one of two ranks does without communication, in each mode, and prints how far it is from one device.

On a GPU if there is one: ``python -m tests.ranks.part_alone``.  The layers need no halo, the image and the result are
parts, so a process group that communicates nothing is enough; draws and CUDA graphs are those of a real rank.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES: dict[str, dict[str, Any]] = {
    "aot_eager": {"inner_backend": "aot_eager"},
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "budget": {"memory_budget": 0.3},
}
STEPS = 8
"""CUDA graphs are replayed from the third on."""


def state() -> Tensor:
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


def train(net: nn.Module, images: list[Tensor], mesh: Any) -> tuple[list[Tensor], Tensor]:
    """Return the second rank's part of each output and each gradient, and the generator's state at the end.

    Args:
        net: The model, transformed where there is a mesh.
        images: One for each step.
        mesh: None where the model runs on whole images.
    """
    found = []
    torch.manual_seed(5)
    for image in images:
        net.zero_grad(set_to_none=True)
        leaf = (image if mesh is None else image[..., image.shape[-1] // 2 :]).clone().requires_grad_()
        given: Any = leaf
        if mesh is not None:
            given = DTensor.from_local(
                leaf, mesh, [Shard(3)], run_check=False, shape=image.shape, stride=image.stride()
            )
        made = net(given)
        made = made if mesh is None else made.to_local()
        made.square().sum().backward()
        parts = [made.detach(), leaf.grad]
        found += [(x if mesh is not None else x[..., x.shape[-1] // 2 :]).clone() for x in parts if x is not None]
    return found, state()


def main() -> None:
    """Print, for each mode, the largest difference and whether the generator is where one device leaves it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.Dropout(0.3), nn.GELU(), nn.Dropout2d(0.2), nn.Conv2d(8, 4, 1), nn.Dropout(0.1)]
    model = nn.Sequential(*layers).to(DEVICE)
    images = [torch.randn(2, 3, 16, 24, device=DEVICE) for _ in range(STEPS)]
    expected, at_end = train(copy.deepcopy(model), images, None)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh(DEVICE, (2,))
    for name, options in MODES.items():
        torch.compiler.reset()
        net = fxshard.transform(copy.deepcopy(model), mesh=mesh, placements=[Shard(3)], outputs="local", **options)
        found, after = train(net, images, mesh)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        said = {"mode": name, "worst": worst, "draws alike": torch.equal(after, at_end)}
        sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()

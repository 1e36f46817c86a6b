"""One rank of a training over several hosts; leaves its weights and statistics in ``rank-N.pt``."""

from __future__ import annotations

import os

import torch
from torch.distributed.tensor import Shard

from fxshard.api import transform
from tests.ranks.test_composition import Setup, plainly
from tests.ranks.test_training_loops import build_with_modes


def main() -> None:
    model = build_with_modes()
    net = transform(model, placements=[Shard(3)], inner_backend="eager")
    torch.manual_seed(0)
    plainly(Setup(model, net))
    torch.save(net.state_dict(), f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()

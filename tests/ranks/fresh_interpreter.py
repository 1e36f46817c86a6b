"""One rank of a program that knows fxshard by the backend's name only; prints what happened as JSON.

Run with torchrun's environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS: dict[str, Any] = {"inner_backend": "eager"}
PATIENCE_S = 3.0
"""For a rank that does not come, in place of the 20 s of users."""


class Net(nn.Module):
    """Two convolutions and a normalisation."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, 2, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    net: Callable[[Tensor], Tensor] = torch.compile(model, backend="fxshard", options=OPTIONS)
    return net


def failure(call: Callable[[], Any]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        classes = [c.__name__ for c in type(error).__mro__]
        return {"classes": classes, "text": str(error), "seconds": time.monotonic() - start}
    return {"classes": [], "text": "", "seconds": time.monotonic() - start}


def broken_loader() -> Tensor:
    msg = "the loader broke"
    raise ValueError(msg)


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    image = torch.randn(1, 3, 9, 21, dtype=torch.float64)
    imported_before = "fxshard" in sys.modules
    net = compiled(Net())
    error = (net(image) - Net()(image)).abs().max().item()
    weights = failure(lambda: compiled(Net(seed=rank))(image))
    last = compiled(Net())
    sys.modules["fxshard.agreement"].TIMEOUT_S = PATIENCE_S  # type: ignore[attr-defined]
    raised_before = failure(lambda: last(broken_loader() if rank == 1 else image))
    said = {"imported_before": imported_before, "error_of_agreeing": error, "weights": weights}
    sys.stdout.write(json.dumps({**said, "raised_before": raised_before}) + "\n")


if __name__ == "__main__":
    main()

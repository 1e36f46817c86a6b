"""What :mod:`tests.user_script` has type checkers read runs, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import cross_entropy

from fxshard.workers import mesh
from tests import user_script

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fxshard.workers import RankPool


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 16), torch.randint(3, (2, 8, 16))


def trained(rank: int) -> tuple[float, float, Tensor]:
    images, labels = batch()
    axis = mesh((2,))
    whole = user_script.train(axis, images, labels)
    batch()  # the same weights again
    parts = user_script.train_parts(axis, images.chunk(2, 3)[rank], labels.chunk(2, 2)[rank])
    batch()
    return whole, parts, user_script.compiled(axis, images).detach()


def test_a_user_s_script_trains_and_compiles(pool: RankPool) -> None:
    images, labels = batch()
    logits = user_script.Net()(images)
    loss = cross_entropy(logits, labels).item()
    for whole, parts, compiled in pool.run(trained, ranks=2):
        assert whole == pytest.approx(loss, rel=1e-5)
        assert parts == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(compiled, logits, rtol=1e-4, atol=1e-5)


def test_a_user_s_script_plans(tmp_path: Path) -> None:
    assert all(path.stat().st_size for path in user_script.looked_at(tmp_path))
    assert "world_size=0" in user_script.refused()


@pytest.mark.nightly
def test_a_user_s_script_verifies() -> None:
    assert user_script.verified()

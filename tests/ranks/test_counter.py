"""``rng="counter"``: the same numbers for any number of ranks, and no rank draws the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from fxshard import backend
from fxshard.api import transform
from fxshard.workers import mesh

if TYPE_CHECKING:
    from typing import Any

    from fxshard.workers import RankPool


class Noisy(nn.Module):
    """Dropout of a map and of channels, noise made in forward, drop path, integers, and a permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.conv(x), 0.3)
        x = nn.functional.dropout2d(x, 0.2)
        x = x + 0.1 * torch.randn_like(x) * torch.rand(x.shape, dtype=x.dtype)
        keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.8)
        x = x * keep / 0.8 + torch.randint_like(x, 3)
        return self.last(x[:, torch.randperm(4)])


def trained(rank: int, shape: tuple[int, ...], inner: str) -> tuple[list[Tensor], list[str]]:
    """Return what two steps leave, and the whole-size draws of the graph (runs in a rank process)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    graphs: list[fx.GraphModule] = []

    def observe(planned: fx.GraphModule, local: fx.GraphModule, config: Any) -> None:
        graphs.append(local)

    model = Noisy().double()
    placements = [Shard(2), Shard(3)][-len(shape) :]
    net = transform(model, mesh=mesh(shape), placements=placements, inner_backend=inner, rng="counter")
    image = torch.randn(2, 3, 7, 13, dtype=torch.float64, requires_grad=True)
    found = []
    backend.on_compiled.append(observe)
    try:
        for _ in range(2):
            out = net(image)
            out.square().mean().backward()
            found.append(out.detach())
    finally:
        backend.on_compiled.remove(observe)
    found += [p.grad for p in (image, *model.parameters()) if p.grad is not None]
    assert len(found) == 7, "two outputs, the gradients of the image and of four parameters"
    whole = [n.name for g in graphs for n in g.graph.nodes if "counter" in str(n.target) and n.args[6] == n.args[4]]
    return [*found, torch.get_rng_state()], whole


@pytest.fixture(scope="module")
def of_one_rank(pool: RankPool) -> list[Tensor]:
    (found, _), *_ = pool.run(trained, (1,), "eager", ranks=1)
    return list(found)


@pytest.mark.parametrize(
    ("shape", "inner"),
    [
        ((2,), "eager"),
        ((3,), "aot_eager"),
        ((2, 2), "eager"),
        pytest.param((2,), "inductor", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_any_number_of_ranks_draws_the_same(
    pool: RankPool, of_one_rank: list[Tensor], shape: tuple[int, ...], inner: str
) -> None:
    assert not torch.equal(of_one_rank[0], of_one_rank[1])  # each step has its own numbers
    for found, whole in pool.run(trained, shape, inner, ranks=torch.Size(shape).numel()):
        for a, b in zip(found, of_one_rank, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        # the masks of dropout2d and of drop path have no width; the maps' draws are made in parts
        assert len(whole) == 2, whole

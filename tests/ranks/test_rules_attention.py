"""Attention and matrix products whose rows, columns, batch or contraction are split."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.compare import Case
from tests.ranks.checks import assert_exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fxshard.workers import RankPool

HEADS, WIDTH = 2, 4
TOKENS = (5, 7)


class Attends(nn.Module):
    """Attention of an image's pixels, (N, heads, tokens, width), with its own queries and mask to learn."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.queries = nn.Parameter(torch.randn(HEADS, 3, WIDTH))
        count = TOKENS[0] * TOKENS[1]
        self.bias = nn.Parameter(torch.randn(HEADS, count, count))
        self.matrix = nn.Parameter(torch.randn(WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.project(x.flatten(2).transpose(1, 2))
        q, k, v = (t.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for t in tokens.chunk(3, 2))
        return self.function(self, q, k, v)


def attend(**options: Any) -> Callable[..., Tensor]:
    return lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def pixels_as_keys(**options: Any) -> Callable[..., Tensor]:
    return lambda m, q, k, v: F.scaled_dot_product_attention(m.queries.expand(k.shape[0], -1, -1, -1), k, v, **options)


def masked(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = (torch.arange(q.shape[2])[:, None] + torch.arange(k.shape[2])) % 3 == 0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


def by_hand(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v


def linear_attention(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "self": attend(),
    "scale": attend(scale=0.3),
    "causal": attend(is_causal=True),
    "mask": masked,
    "learned-bias": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias),
    "grouped-queries": lambda m, q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "pixels-as-keys": pixels_as_keys(),
    "pixels-as-keys-causal": pixels_as_keys(is_causal=True),
    "by-hand": by_hand,
    "linear": linear_attention,
    "matmul": lambda m, q, k, v: (q @ m.matrix) + (q.transpose(1, 2) @ m.matrix).transpose(1, 2),
    "matmul-vector": lambda m, q, k, v: q @ m.matrix[:, 0] + (q.flatten() @ k.flatten()),
    "einsum": lambda m, q, k, v: torch.einsum("nhtc,nhsc->nhts", q, k) + torch.einsum("nhtc,nhtd->nhcd", q, v).mean(),
}
MESHES = {"w-2": ((3,), (2,)), "h-3": ((2,), (3,)), "2x2": ((2, 3), (2, 2)), "n-2": ((0,), (2,))}


def build(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    return Attends(FUNCTIONS[name]), (torch.randn(2, HEADS * WIDTH, *TOKENS),)


def case(name: str, mesh: str) -> Case:
    dims, shape = MESHES[mesh]
    return Case(functools.partial(build, name), tuple(Shard(d) for d in dims), shape)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_attention_equals_one_device(pool: RankPool, name: str, mesh: str) -> None:
    assert_exact(pool, case(name, mesh))

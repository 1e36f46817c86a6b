"""A program that stands for a call returns what the call returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.errors import FxShardError
from fxshard.rules import Expand, Rule, registered
from tests.rank_graphs import graphs

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


class Largest(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.max(x, 3)
        return values, indices


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "shape": (lambda x, dim, keepdim: (x.amax(dim, True), x.argmax(dim)), r"float32\[2, 3, 4, 1\], torch\.int64"),
    "dtype": (lambda x, dim, keepdim: (x.amax(dim), x.argmax(dim).int()), r"torch\.int32\[2, 3, 4\] in place of"),
    "count": (lambda x, dim, keepdim: x.amax(dim), r"returns torch\.float32\[2, 3, 4\] in place of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_returns_something_else_is_our_bug(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    program, said = WRONG[name]
    monkeypatch.setitem(registered(), aten.max.dim, Rule(lambda call, at: Expand(program)))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        graphs(Largest(), (torch.randn(2, 3, 4, 8),))
    error = caught.value.inner_exception
    assert isinstance(error, FxShardError)
    with pytest.raises(FxShardError, match=rf"program of aten\.max\.dim.*{said}.*a bug of its rule"):
        raise error


def test_a_result_lies_in_memory_as_the_call_s_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
        return x.amax(dim).transpose(1, 2).contiguous().transpose(1, 2), x.long().amax(dim)

    monkeypatch.setitem(registered(), aten.max.dim, Rule(lambda call, at: Expand(program)))
    found = graphs(Largest(), (torch.randn(2, 3, 4, 8),))
    (output,) = (n for n in found.planned.graph.nodes if n.op == "output")
    assert output.args[0][0].meta["val"].stride() == (12, 4, 1)

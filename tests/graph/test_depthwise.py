"""The depthwise convolution: its kernels in Triton's interpreter, its operators on the CPU, and where it is used."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard import faster
from fxshard.ops.depthwise import DEPTHWISE_CONV2D
from fxshard.passes.config import Config
from fxshard.passes.pipeline import executable
from tests.rank_graphs import calls, graphs

if TYPE_CHECKING:
    from torch import fx

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.graph.interpreted_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert len(worst) == 3
    assert max(worst.values()) < 2e-5, worst  # of sums of up to 198 products in float32


def inputs(order: torch.memory_format, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 9, 12, dtype=dtype, device=device).contiguous(memory_format=order)
    weight, bias = torch.randn(6, 1, 7, 5, dtype=dtype, device=device), torch.randn(6, dtype=dtype, device=device)
    return [t.requires_grad_() for t in (x, weight, bias)]


ORDERS = pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck asks for one that is not there
@ORDERS
def test_the_operator_is_the_convolution(order: torch.memory_format) -> None:
    given = inputs(order)
    x, weight, bias = given
    made, expected = DEPTHWISE_CONV2D(x, weight, bias, [3, 0]), F.conv2d(x, weight, bias, 1, (3, 0), groups=6)
    assert made.stride() == expected.stride()
    torch.testing.assert_close(made, expected)
    grad = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(y, given, grad) for y in (made, expected))
    torch.testing.assert_close(found, wanted)
    torch.library.opcheck(DEPTHWISE_CONV2D, (*given, [3, 0]))
    torch.library.opcheck(DEPTHWISE_CONV2D, (*given[:2], None, [0, 2]))


@ON_CUDA
@ORDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_on_a_gpu(order: torch.memory_format, dtype: torch.dtype) -> None:
    given = inputs(order, dtype, "cuda")
    exact = [t.detach().double().requires_grad_() for t in given]
    x, weight, bias = exact
    made, expected = DEPTHWISE_CONV2D(*given, [3, 0]), F.conv2d(x, weight, bias, 1, (3, 0), groups=6)
    grad = torch.randn_like(made)
    found, wanted = torch.autograd.grad(made, given, grad), torch.autograd.grad(expected, exact, grad.double())
    for one, other in zip((made, *found), (expected, *wanted), strict=True):
        away = (one.double() - other).abs().max() / other.abs().max()
        assert away < 4 * torch.finfo(dtype).eps
    torch.library.opcheck(DEPTHWISE_CONV2D, (*given, [3, 0]))


class Net(nn.Module):
    """Convolutions of which one fits a kernel, and others do not: a small filter, a stride, two channels a group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 4, 7, padding=3, groups=4),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.Conv2d(4, 4, 7, padding=3, groups=2),
            nn.Conv2d(4, 4, 7, stride=2, padding=3, groups=4),
            nn.Conv2d(4, 4, 7, padding=3, groups=4, padding_mode="reflect", bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def used(*, kernels: bool = True) -> list[fx.Node]:
    """Return the calls of the kernel in the graph that a rank runs."""
    found = graphs(Net(), [torch.randn(2, 4, 16, 32)], mesh_shape=(2,), dims=(3,))
    return calls(executable(found.local, config=dataclasses.replace(found.config, kernels=kernels)), DEPTHWISE_CONV2D)


@pytest.fixture
def faster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if this device were one where the kernels are faster."""
    monkeypatch.setattr(faster, "is_faster_on", lambda _: True)
    monkeypatch.setattr(faster, "TYPES", (torch.float32,))


def test_what_fits_becomes_the_kernel(faster_here: None) -> None:
    made = used()
    assert [node.args[3] for node in made] == [[3, 0], [0, 0]]  # the halo, and what is reflected, is in the input
    assert made[0].args[2] is not None
    assert made[1].args[2] is None


def test_it_has_to_be_switched_on(faster_here: None) -> None:
    assert not used(kernels=False)
    assert not Config((2,), (3,), None).kernels


def test_other_types_stay(faster_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "TYPES", (torch.float16,))
    assert not used()


def test_a_cpu_has_no_kernels_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert not faster.is_faster_on(torch.device("cpu"))
    assert not used(kernels=False)
    assert not caplog.messages
    assert not used()
    assert "no operator with a kernel that is faster on this device" in caplog.text

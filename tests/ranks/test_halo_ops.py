"""halo_exchange and halo_accumulate on real ranks: values, adjoints, second derivatives, memory format, compiled code.

The adjoint test, in float64 and with local values x_r, y_r on rank r (no side is replicated)::

    sum over r of <(F x)_r, y_r>  =  sum over r of <x_r, (F* y)_r>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from fxshard.ops import LOWERINGS
from fxshard.rank_process import mesh
from tests.op_cases import HALOS, Halo, Kernels, dot, leaf, own, values, windowed
from tests.reference_window import MODES, sources

if TYPE_CHECKING:
    from torch import Tensor

    from fxshard.workers import RankPool

OPS = torch.ops.fxshard


def run_halo(rank: int, halo: Halo, shape: tuple[int, ...], dim: int, mode: str) -> dict[str, Tensor]:
    x = leaf(own(values(*shape), dim, halo.bounds, rank))
    args = halo.args(rank, dim, mode)
    window = OPS.halo_exchange(x, *args)
    y = leaf(values(*window.shape, seed=10 + rank))
    (grad,) = torch.autograd.grad(window, x, y, create_graph=True)
    v = own(values(*shape, seed=99), dim, halo.bounds, rank)
    (second,) = torch.autograd.grad(grad, y, v)
    direct = OPS.halo_accumulate(y.detach(), *args)
    return {"x": x, "window": window, "y": y, "grad": grad, "second": second, "direct": direct}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("halo", HALOS.values(), ids=HALOS)
def test_halo_exchange_and_its_adjoint(pool: RankPool, halo: Halo, mode: str) -> None:
    dim, shape = 2, (2, 3, halo.size)
    results = pool.run(run_halo, halo, shape, dim, mode, ranks=halo.ranks)
    x, v = leaf(values(*shape)), values(*shape, seed=99)
    expected = [windowed(x, dim, window, mode) for window in halo.windows]
    (grad,) = torch.autograd.grad(expected, x, [r["y"] for r in results])
    for rank, (result, window) in enumerate(zip(results, halo.windows, strict=True)):
        torch.testing.assert_close(result["window"], expected[rank], rtol=0, atol=0)
        torch.testing.assert_close(result["grad"], own(grad, dim, halo.bounds, rank), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["direct"], result["grad"], rtol=0, atol=0)
        torch.testing.assert_close(result["second"], windowed(v, dim, window, mode), rtol=0, atol=0)
    forward = sum(dot(r["window"], r["y"]) for r in results)
    assert forward == pytest.approx(sum(dot(r["x"], r["grad"]) for r in results), rel=1e-12)


def run_curved(rank: int, halo: Halo, dim: int, mode: str) -> tuple[Tensor, Tensor]:
    x = leaf(own(values(3, halo.size), dim, halo.bounds, rank))
    loss = OPS.halo_exchange(x.sin(), *halo.args(rank, dim, mode)).pow(3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (curvature,) = torch.autograd.grad(grad.cos().sum(), x)
    return grad, curvature


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_through_halo_exchange(pool: RankPool, mode: str) -> None:
    halo = HALOS["several-hops-4"]
    results = pool.run(run_curved, halo, 1, mode)
    x = leaf(values(3, halo.size))
    loss = torch.stack([windowed(x.sin(), 1, window, mode).pow(3).sum() for window in halo.windows]).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (curvature,) = torch.autograd.grad(grad.cos().sum(), x)
    torch.testing.assert_close(torch.cat([g for g, _ in results], 1), grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([c for _, c in results], 1), curvature, rtol=1e-10, atol=1e-10)


def run_constant(rank: int, dtype: torch.dtype, value: float) -> tuple[Tensor, Tensor]:
    halo = HALOS["uneven-2"]
    x = own(values(2, halo.size), 1, halo.bounds, rank).to(dtype)
    return OPS.halo_exchange(x, *halo.args(rank, 1, "constant", value)), x


@pytest.mark.parametrize(
    ("dtype", "value", "stands_for"),
    [
        (torch.float32, -torch.inf, -torch.inf),
        (torch.bfloat16, 2.5, 2.5),
        (torch.complex64, 1.5, 1.5),
        (torch.int64, -torch.inf, torch.iinfo(torch.int64).min),
        (torch.uint8, 7.0, 7),
        (torch.bool, 0.0, False),
    ],
    ids=str,
)
def test_halo_exchange_fills_with_a_constant(
    pool: RankPool, dtype: torch.dtype, value: float, stands_for: complex
) -> None:
    halo = HALOS["uneven-2"]
    results = pool.run(run_constant, dtype, value, ranks=2)
    x = torch.cat([part for _, part in results], 1)
    for (window, _), interval in zip(results, halo.windows, strict=True):
        filled = torch.tensor(sources(interval, halo.size, "constant")) < 0
        assert window.dtype == dtype
        assert (window[:, filled] == stands_for).all()
        assert torch.equal(window[:, ~filled], x[:, max(0, interval[0]) : interval[1]])


def run_memory(rank: int, shape: tuple[int, ...], dim: int) -> list[tuple[bool, bool, list[str]]]:
    halo = HALOS["uneven-2"]
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    args = halo.args(rank, dim)
    found = []
    for formatted in (memory_format, torch.contiguous_format):
        x = leaf(own(values(*shape), dim, halo.bounds, rank), formatted)
        with Kernels() as kernels:
            window = LOWERINGS[OPS.halo_exchange.default](x.detach(), *args)
            grad = LOWERINGS[OPS.halo_accumulate.default](window, *args)
        large = [name for name, numel in kernels.written if numel > x.numel() * 3 // 4]
        kept = all(t.is_contiguous(memory_format=formatted) for t in (window, grad, OPS.halo_exchange(x, *args)))
        found.append((kept, torch.equal(window, OPS.halo_exchange(x, *args)), large))
    return found


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 16, 8), 3), ((2, 3, 8, 16), 2), ((2, 3, 4, 5, 8), 4)], ids=str)
def test_halo_exchange_writes_an_activation_once_in_its_own_format(
    pool: RankPool, shape: tuple[int, ...], dim: int
) -> None:
    for result in pool.run(run_memory, shape, dim, ranks=2):
        for kept, same, large in result:
            assert kept
            assert same
            assert large == ["cat", "cat"], "one for the window, one for the gradient"


def run_mixed_strides(rank: int) -> tuple[Tensor, Tensor]:
    halo = HALOS["uneven-2"]
    memory_format = torch.channels_last if rank else torch.contiguous_format
    x = leaf(own(values(2, 3, 5, halo.size), 3, halo.bounds, rank), memory_format)
    window = OPS.halo_exchange(x, *halo.args(rank, 3))
    (grad,) = torch.autograd.grad(window.square().sum(), x)
    return window, grad


def test_ranks_may_disagree_on_the_memory_format(pool: RankPool) -> None:
    halo = HALOS["uneven-2"]
    results = pool.run(run_mixed_strides, ranks=2)
    x = leaf(values(2, 3, 5, halo.size))
    expected = [windowed(x, 3, window, "constant") for window in halo.windows]
    (grad,) = torch.autograd.grad(torch.cat([w.square() for w in expected], 3).sum(), x)
    for rank, (window, local) in enumerate(results):
        torch.testing.assert_close(window, expected[rank], rtol=0, atol=0)
        torch.testing.assert_close(local, own(grad, 3, halo.bounds, rank), rtol=1e-12, atol=1e-12)


def run_on_an_axis(rank: int, dim: int) -> Tensor:
    """A 2 x 2 mesh: H over its first axis, W over its second, one dimension after the other."""
    device_mesh, bounds = mesh((2, 2)), (0, 3, 7)
    coords = (rank // 2, rank % 2)
    x = own(own(values(1, 2, 7, 7), 2, bounds, coords[0]), 3, bounds, coords[1])
    for axis, d in ((0, 2), (1, 3)) if dim == 2 else ((1, 3), (0, 2)):
        name = device_mesh.get_group(axis).group_name
        x = OPS.halo_exchange(x, d, list(bounds), [-1, 2], [4, 8], "reflect", 0.0, coords[axis], name)
    return x


@pytest.mark.parametrize("first", [2, 3])
def test_a_two_dimensional_halo_has_its_corners(pool: RankPool, first: int) -> None:
    x = values(1, 2, 7, 7)
    for rank, window in enumerate(pool.run(run_on_an_axis, first)):
        rows, columns = (((-1, 4), (2, 8))[coord] for coord in (rank // 2, rank % 2))
        expected = windowed(windowed(x, 2, rows, "reflect"), 3, columns, "reflect")
        assert torch.equal(window, expected)


def register_lowerings() -> None:
    from torch._inductor.decomposition import decompositions, register_decomposition

    for op, lowering in LOWERINGS.items():
        if op not in decompositions:
            register_decomposition([op])(lowering)


def run_compiled(rank: int, halo: Halo, mode: str, backend: str) -> dict[str, Any]:
    import torch._inductor.config
    from torch._inductor.utils import run_and_get_code

    register_lowerings()
    args = halo.args(rank, 3, mode)

    def curved(x: Tensor) -> Any:
        return OPS.halo_exchange(OPS.halo_exchange(x.sin(), *args).narrow(3, 0, x.shape[3]).exp(), *args).cos()

    def step() -> list[Tensor]:
        x = leaf(own(values(2, 3, 4, halo.size), 3, halo.bounds, rank))
        out = torch.compile(curved, backend=backend, fullgraph=True, dynamic=False)(x)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    with torch._inductor.config.patch(force_disable_caches=True):
        compiled, code = run_and_get_code(step)
    x = leaf(own(values(2, 3, 4, halo.size), 3, halo.bounds, rank))
    out = curved(x)
    eager = [out, *torch.autograd.grad(out.square().sum(), x)]
    calls = [text.count("_c10d_functional.all_to_all_single.default(") for text in code]
    return {"compiled": compiled, "eager": eager, "calls": calls}


@pytest.mark.parametrize(
    ("name", "mode", "backend"),
    [
        ("uneven-3", "constant", "aot_eager"),
        ("uneven-4", "reflect", "aot_eager"),
        pytest.param("left-only-2", "constant", "inductor", marks=pytest.mark.nightly),
        pytest.param("uneven-2", "reflect", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_halo_exchange_is_the_eager_one(pool: RankPool, name: str, mode: str, backend: str) -> None:
    halo = HALOS[name]
    for result in pool.run(run_compiled, halo, mode, backend, ranks=halo.ranks, timeout_s=250):
        for compiled, eager in zip(result["compiled"], result["eager"], strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
        # forward and backward, two exchanges each, on every rank: also where nothing comes in
        assert result["calls"] == ([2, 2] if backend == "inductor" else [])

"""Communication operators on real ranks: values, adjoints, second derivatives, contracts.

The adjoint test of an operator F with gradient F*, in float64 and with local values x_r, y_r on rank r::

    sum over r of <(F x)_r, y_r>  =  sum over r of <x_r, (F* y)_r>

A replicated value is one value that n ranks have a copy of.  It is paired once and not n times, so on a
replicated side only rank 0's product is counted; that all copies are equal is asserted first.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fxshard.ops import LOWERINGS, traffic
from tests.op_cases import HALOS, Kernels, around, dot, group, leaf, own, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

    from fxshard.workers import RankPool

OPS = torch.ops.fxshard


# ------------------------------------------------------------------------- all_gather, slice and redistribute

BOUNDS = {
    "even-2": (0, 4, 8),
    "uneven-3": (0, 3, 4, 9),
    "even-4": (0, 2, 4, 6, 8),
    "uneven-4": (0, 1, 6, 8, 11),
    "empty-4": (0, 4, 4, 7, 7),
    "one-rank": (0, 5),
}


def part(x: Tensor, dim: int, bounds: tuple[int, ...], outer: int, rank: int) -> Tensor:
    return own(x.unflatten(dim, (outer, bounds[-1])), dim + 1, bounds, rank).flatten(dim, dim + 1)


def run_gather_and_slice(rank: int, bounds: tuple[int, ...], outer: int) -> dict[str, Tensor]:
    whole = values(2, outer * bounds[-1], 3)
    args = (1, list(bounds), outer, rank, group(len(bounds) - 1))
    x, full = leaf(part(whole, 1, bounds, outer, rank)), leaf(whole)
    gathered, sliced = OPS.all_gather(x, *args), OPS.slice(full, *args)
    y, z = leaf(values(*whole.shape, seed=5)), leaf(values(*sliced.shape, seed=10 + rank))
    (grad_x,) = torch.autograd.grad(gathered, x, y, create_graph=True)
    (grad_full,) = torch.autograd.grad(sliced, full, z, create_graph=True)
    (second_y,) = torch.autograd.grad(grad_x, y, x.detach())
    (second_z,) = torch.autograd.grad(grad_full, z, whole)
    return {"x": x, "y": y, "z": z, "gathered": gathered, "sliced": sliced} | {
        "grad_x": grad_x,
        "grad_full": grad_full,
        "second_y": second_y,
        "second_z": second_z,
    }


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_all_gather_and_slice_are_adjoint(pool: RankPool, bounds: tuple[int, ...], outer: int) -> None:
    results = pool.run(run_gather_and_slice, bounds, outer, ranks=len(bounds) - 1)
    whole = values(2, outer * bounds[-1], 3)
    for rank, result in enumerate(results):
        mine = part(whole, 1, bounds, outer, rank)
        assert torch.equal(result["gathered"], whole)
        assert torch.equal(result["second_y"], whole)
        assert torch.equal(result["sliced"], mine)
        assert torch.equal(result["second_z"], mine)
        assert torch.equal(result["grad_full"], results[0]["grad_full"]), "copies are equal"
    assert dot(whole, results[0]["y"]) == pytest.approx(sum(dot(r["x"], r["grad_x"]) for r in results), rel=1e-12)
    forward = sum(dot(r["sliced"], r["z"]) for r in results)
    assert forward == pytest.approx(dot(whole, results[0]["grad_full"]), rel=1e-12)


def run_formats(rank: int) -> list[bool]:
    bounds, name = [0, 3, 8], group(2)
    x = own(values(2, 4, 5, 8), 3, (0, 3, 8), rank).contiguous(memory_format=torch.channels_last)
    results = [
        OPS.all_gather(x, 3, bounds, 1, rank, name),
        OPS.slice(values(2, 4, 5, 8).contiguous(memory_format=torch.channels_last), 3, bounds, 1, rank, name),
        OPS.redistribute(x, 3, bounds, 2, [0, 2, 5], rank, name),
    ]
    return [r.is_contiguous(memory_format=torch.channels_last) for r in results]


def test_other_operators_keep_channels_last(pool: RankPool) -> None:
    assert pool.run(run_formats, ranks=2) == [[True] * 3] * 2


def run_redistribute(rank: int, dims: tuple[int, int], cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    (a, b), (from_bounds, to_bounds) = dims, cuts
    shape = [2, 3, 4, 5]
    shape[a], shape[b] = from_bounds[-1], to_bounds[-1]
    x = leaf(own(values(*shape), a, from_bounds, rank))
    out = OPS.redistribute(x, a, list(from_bounds), b, list(to_bounds), rank, group(len(from_bounds) - 1))
    y = leaf(values(*out.shape, seed=10 + rank))
    (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
    (second,) = torch.autograd.grad(grad, y, x.detach())
    return {"x": x, "y": y, "out": out, "grad": grad, "second": second, "whole": values(*shape)}


REDISTRIBUTIONS = [
    pytest.param((3, 2), ((0, 4, 8), (0, 3, 6)), id="w-to-h-2"),
    pytest.param((2, 0), ((0, 1, 6, 7), (0, 2, 3, 7)), id="h-to-n-uneven-3"),
    pytest.param((3, 1), ((0, 2, 2, 5, 6), (0, 4, 4, 5, 8)), id="w-to-c-empty-4"),
    pytest.param((1, 3), ((0, 5), (0, 6)), id="one-rank"),
]


@pytest.mark.parametrize(("dims", "cuts"), REDISTRIBUTIONS)
def test_redistribute_and_its_adjoint(
    pool: RankPool, dims: tuple[int, int], cuts: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    results = pool.run(run_redistribute, dims, cuts, ranks=len(cuts[0]) - 1)
    y = torch.cat([r["y"] for r in results], dims[1])
    for rank, result in enumerate(results):
        expected = own(result["whole"], dims[1], cuts[1], rank)
        assert torch.equal(result["out"], expected)
        assert torch.equal(result["second"], expected)
        assert torch.equal(result["grad"], own(y, dims[0], cuts[0], rank))
    forward = sum(dot(r["out"], r["y"]) for r in results)
    assert forward == pytest.approx(sum(dot(r["x"], r["grad"]) for r in results), rel=1e-12)


# --------------------------------------------------------------------------------- all_reduce and sum_gradient


def run_sums(rank: int, ranks: int) -> dict[str, Tensor]:
    term, shared = leaf(values(3, 4, seed=rank)), leaf(values(3, 4, seed=50))
    total, copy = OPS.all_reduce(term, "sum", group(ranks)), OPS.sum_gradient(shared, group(ranks))
    y, z = leaf(values(3, 4, seed=60)), leaf(values(3, 4, seed=70 + rank))
    (grad_term,) = torch.autograd.grad(total, term, y, create_graph=True)
    (grad_shared,) = torch.autograd.grad(copy, shared, z, create_graph=True)
    (second_y,) = torch.autograd.grad(grad_term, y, term.detach())
    (second_z,) = torch.autograd.grad(grad_shared, z, y.detach())
    return {"term": term, "total": total, "y": y, "z": z, "copy": copy, "shared": shared} | {
        "grad_term": grad_term,
        "grad_shared": grad_shared,
        "second_y": second_y,
        "second_z": second_z,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce_and_sum_gradient_are_adjoint(pool: RankPool, ranks: int) -> None:
    results = pool.run(run_sums, ranks, ranks=ranks)
    total = torch.stack([r["term"] for r in results]).sum(0)
    summed = torch.stack([r["z"] for r in results]).sum(0)
    y, shared = results[0]["y"], results[0]["shared"]
    for result in results:
        torch.testing.assert_close(result["total"], total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["second_y"], total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["grad_shared"], summed, rtol=1e-12, atol=1e-12)
        assert torch.equal(result["grad_term"], y)
        assert torch.equal(result["copy"], shared)
        assert torch.equal(result["second_z"], y)
    # Partial -> Replicate: the total is paired once; Replicate -> the ranks' work: the shared value is paired once
    assert dot(total, y) == pytest.approx(sum(dot(r["term"], r["grad_term"]) for r in results), rel=1e-12)
    forward = sum(dot(r["copy"], r["z"]) for r in results)
    assert forward == pytest.approx(dot(shared, results[0]["grad_shared"]), rel=1e-12)


def run_extremum(rank: int, op: str) -> tuple[Tensor, str]:
    x = leaf(values(5, seed=rank))
    reduced = OPS.all_reduce(x, op, group(3))
    with pytest.raises(RuntimeError) as error:
        reduced.sum().backward()
    return reduced, str(error.value)


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extremum_has_no_gradient(pool: RankPool, op: str) -> None:
    terms = torch.stack([values(5, seed=rank) for rank in range(3)])
    expected = terms.amax(0) if op == "max" else terms.amin(0)
    for reduced, message in pool.run(run_extremum, op, ranks=3):
        assert torch.equal(reduced, expected)
        assert f"all_reduce(op={op!r}) has no gradient" in message


# ------------------------------------------------------------------------------------------------ all together


def run_convolution(rank: int, bounds: tuple[int, ...]) -> list[Tensor]:
    ranks = len(bounds) - 1
    part_args = (2, list(bounds), 1, rank, group(ranks))
    x, weight = leaf(values(2, 3, bounds[-1])), leaf(values(4, 3, 3, seed=1))
    local = OPS.slice(x, *part_args)
    window = OPS.halo_exchange(local, *around(bounds, 1, 1).args(rank, 2))
    out = torch.nn.functional.conv1d(window, OPS.sum_gradient(weight, group(ranks)))
    energy = OPS.all_reduce(out.square().sum((0, 2), keepdim=True), "sum", group(ranks))
    out = out - OPS.sum_gradient(energy, group(ranks)).sqrt()  # replicated, and used by each rank's part
    return derivatives(OPS.all_gather(out, *part_args), x, weight)


def derivatives(out: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(out.sin().sum(), (x, weight), create_graph=True)
    penalty = grads[0].square().sum() + grads[1].square().sum()
    return [out, *grads, *torch.autograd.grad(penalty, (x, weight))]


@pytest.mark.parametrize("bounds", [(0, 4, 9), (0, 2, 7, 8, 12)], ids=str)
def test_a_split_convolution_has_the_derivatives_of_a_whole_one(pool: RankPool, bounds: tuple[int, ...]) -> None:
    x, weight = leaf(values(2, 3, bounds[-1])), leaf(values(4, 3, 3, seed=1))
    whole = torch.nn.functional.conv1d(x, weight, padding=1)
    expected = derivatives(whole - whole.square().sum((0, 2), keepdim=True).sqrt(), x, weight)
    for result in pool.run(run_convolution, bounds, ranks=len(bounds) - 1):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def run_complex(rank: int) -> list[Tensor]:
    bounds, name = (0, 3, 8), group(2)
    x = own(torch.complex(values(2, 8), values(2, 8, seed=1)), 1, bounds, rank).conj()
    y = OPS.redistribute(x, 1, list(bounds), 0, [0, 1, 2], rank, name)
    return [OPS.all_gather(x, 1, list(bounds), 1, rank, name), y, OPS.all_reduce(y, "sum", name)]


def test_complex_numbers_travel(pool: RankPool) -> None:
    x = torch.complex(values(2, 8), values(2, 8, seed=1)).conj()
    for rank, (gathered, redistributed, total) in enumerate(pool.run(run_complex, ranks=2)):
        assert torch.equal(gathered, x)
        assert torch.equal(redistributed, x[rank : rank + 1])
        torch.testing.assert_close(total, x.sum(0, keepdim=True), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------- contracts of the operators


def calls(rank: int) -> dict[str, tuple[OpOverload, tuple[Any, ...]]]:
    """One call of every operator on two ranks, with an input that needs a gradient."""
    halo, bounds, name = HALOS["uneven-2"], [0, 5, 8], group(2)
    x = leaf(own(values(2, 4, 6, 8), 3, halo.bounds, rank), torch.channels_last)
    window = leaf(values(2, 4, 6, halo.windows[rank][1] - halo.windows[rank][0]))
    whole = leaf(values(2, 4, 6, 8))
    return {
        "halo_exchange": (OPS.halo_exchange.default, (x, *halo.args(rank, 3, "reflect"))),
        "halo_accumulate": (OPS.halo_accumulate.default, (window, *halo.args(rank, 3, "reflect"))),
        "all_gather": (OPS.all_gather.default, (x, 3, bounds, 1, rank, name)),
        "slice": (OPS.slice.default, (whole, 3, bounds, 1, rank, name)),
        "redistribute": (OPS.redistribute.default, (x, 3, bounds, 2, [0, 2, 6], rank, name)),
        "all_reduce": (OPS.all_reduce.default, (whole, "sum", name)),
        "sum_gradient": (OPS.sum_gradient.default, (whole, name)),
    }


OPERATORS = ["halo_exchange", "halo_accumulate", "all_gather", "slice", "redistribute", "all_reduce", "sum_gradient"]


def run_opcheck(rank: int, name: str) -> dict[str, str]:
    op, args = calls(rank)[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    return torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(pool: RankPool, name: str) -> None:
    for result in pool.run(run_opcheck, name, ranks=2):
        assert set(result.values()) == {"SUCCESS"}


def run_traffic(rank: int, name: str) -> tuple[tuple[int, int], list[tuple[str, int, int]]]:
    op, (x, *args) = calls(rank)[name]
    with Kernels() as kernels:
        LOWERINGS[op](x.detach(), *args)
    said = traffic(op, args, x.shape, x.element_size())
    return (said.messages, said.bytes), [sent(rank, *call) for call in kernels.collectives]


def sent(rank: int, func: OpOverload, args: tuple[Any, ...]) -> tuple[str, int, int]:
    """The collective's name, and the messages and bytes that leave this rank of two."""
    name, x = func.overloadpacket.__name__, args[0]
    if name == "all_to_all_single":
        leaving = args[2][1 - rank]
        return name, int(leaving > 0), leaving * x.element_size()
    return name, 1, x.numel() * x.element_size()


@pytest.mark.parametrize("name", OPERATORS)
def test_traffic_is_what_leaves_the_rank(pool: RankPool, name: str) -> None:
    silent = name in ("slice", "sum_gradient")
    for said, collectives in pool.run(run_traffic, name, ranks=2):
        if silent:
            assert (said, collectives) == ((0, 0), [])
            continue
        assert [call[0] for call in collectives][1:] == ["wait_tensor"], "one collective, and its wait"
        assert said == collectives[0][1:]


def run_refused(rank: int, call: Callable[[int], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call(rank)
    return f"{type(error.value).__name__}: {error.value}"


def gather_of_too_much(rank: int) -> Any:
    return OPS.all_gather(values(3, 9), 1, [0, 4, 8], 2, rank, group(2))


def exchange_of_too_little(rank: int) -> Any:
    return OPS.halo_exchange(values(3, 2), 1, [0, 4, 8], [0, 3], [5, 8], "constant", 0.0, rank, group(2))


def redistribution_of_one_dim(rank: int) -> Any:
    return OPS.redistribute(values(3, 4), 1, [0, 4, 8], 1, [0, 3, 8], rank, group(2))


def reduction_by_mean(rank: int) -> Any:
    return OPS.all_reduce(values(3), "mean", group(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (gather_of_too_much, "holds 9 positions of dim 1 (shape (3, 9)), but the bounds give it 8"),
        (exchange_of_too_little, "holds 2 positions of dim 1 (shape (3, 2)), but the bounds give it 4"),
        (redistribution_of_one_dim, "both splits are of dim 1; use halo_exchange"),
        (reduction_by_mean, "op 'mean' is not one of sum, max, min"),
    ],
)
def test_refusals(pool: RankPool, call: Callable[[int], Any], message: str) -> None:
    for said in pool.run(run_refused, call, ranks=2):
        assert said.startswith("FxShardError: fxshard::")
        assert message in said


def test_bounds_table_is_what_it_says() -> None:
    for name, bounds in BOUNDS.items():
        lengths = [hi - lo for lo, hi in pairwise(bounds)]
        assert list(accumulate(lengths)) == list(bounds[1:])
        assert ("even" in name.split("-")) == (len(lengths) > 1 and len(set(lengths)) == 1)

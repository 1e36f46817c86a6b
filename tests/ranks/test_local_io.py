"""A rank may pass its own part of an image, and keep its own part of a map."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxshard import agreement, meeting
from fxshard._torch import _get_default_store
from fxshard.api import transform
from fxshard.errors import FxShardError, PlanError
from fxshard.workers import mesh
from tests.ranks.training import logged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from fxshard.workers import RankPool

Cuts = tuple[tuple[int, tuple[int, ...]], ...]
"""For each mesh axis the dimension that it splits, and the bounds."""
WIDTH: Cuts = ((3, (0, 9, 11, 21)),)
EVEN: Cuts = ((3, (0, 8, 16)),)
BOTH: Cuts = ((2, (0, 7, 12)), (3, (0, 10, 21)))


class Segmenter(nn.Module):
    """A map of the image's size, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.GELU())
        self.down = nn.Conv2d(4, 4, 3, 2, padding=1)
        self.head = nn.Conv2d(4, 2, 1)
        self.classify = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.down(self.stem(x))
        up = nn.functional.interpolate(low, x.shape[2:], mode="bilinear")
        return {"map": self.head(up), "classes": self.classify(low.mean((2, 3)))}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Segmenter().double()


def image(cuts: Cuts) -> Tensor:
    sizes = {2: 12, 3: 21} | {dim: bounds[-1] for dim, bounds in cuts}
    return torch.randn(2, 3, sizes[2], sizes[3], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cut(x: Tensor, cuts: Cuts, coords: Sequence[int]) -> Tensor:
    for (dim, bounds), at in zip(cuts, coords, strict=True):
        lo, hi = list(pairwise(bounds))[at]
        x = x.narrow(dim, lo, hi - lo)
    return x


def loss_of(found: dict[str, Tensor], weight: Tensor) -> Tensor:
    return (found["map"] * weight).sum() + found["classes"].square().sum()


def weights(cuts: Cuts) -> Tensor:
    whole = image(cuts)
    return torch.linspace(-1, 1, whole[:, :2].numel(), dtype=torch.float64).reshape(whole[:, :2].shape)


def total(x: Tensor) -> Tensor:
    """Return the sum of a DTensor, whole."""
    summed = x.sum()
    assert isinstance(summed, DTensor)
    return summed.full_tensor()


def check_trained(net: nn.Module, reference: nn.Module) -> None:
    """Assert that both models have the same gradients and buffers."""
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=f"gradient of {name}")
    for a, b in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def plain_parts(rank: int, cuts: Cuts, backend: str, outputs: Any) -> None:
    """Pass this rank's part as a plain tensor (runs in a rank process)."""
    spatial: DeviceMesh = mesh(tuple(len(bounds) - 1 for _, bounds in cuts))
    coords = spatial.get_coordinate()
    assert coords is not None
    placements = [Shard(dim) for dim, _ in cuts]
    model, reference = build(), build()
    net = transform(model, mesh=spatial, placements=placements, inner_backend=backend, inputs="local", outputs=outputs)
    for _ in range(2):  # the second step takes the compiled graph
        whole = image(cuts).requires_grad_()
        part = cut(whole.detach(), cuts, coords).clone().requires_grad_()
        expected, found = reference(whole), net(part)
        weight = weights(cuts)
        loss_of(expected, weight).backward()
        got = found["map"]
        assert isinstance(got, DTensor) == (outputs == "local")
        assert not isinstance(found["classes"], DTensor)
        if isinstance(got, DTensor):
            assert tuple(got.placements) == tuple(placements)
            assert got.to_local().numel() < got.numel()
            weight = distribute_tensor(weight, spatial, placements, src_data_rank=None)
            torch.testing.assert_close(got.full_tensor(), expected["map"], rtol=1e-9, atol=1e-9)
            total(got * weight).backward(retain_graph=True)
            found["classes"].square().sum().backward()
        else:
            torch.testing.assert_close(got, expected["map"], rtol=1e-9, atol=1e-9)
            loss_of(found, weight).backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, cut(whole.grad, cuts, coords), rtol=1e-9, atol=1e-9)
    check_trained(model, reference)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("outputs", ["global", "local"])
@pytest.mark.parametrize("cuts", [WIDTH, EVEN, BOTH], ids=["uneven", "even", "two dims"])
def test_plain_parts(pool: RankPool, cuts: Cuts, outputs: str, backend: str) -> None:
    ranks = torch.Size(len(bounds) - 1 for _, bounds in cuts).numel()
    pool.run(plain_parts, cuts, backend, outputs, ranks=ranks)


def dtensor_parts(rank: int) -> None:
    """Pass a DTensor, which needs no option (runs in a rank process)."""
    spatial = mesh((3,))
    model, reference = build(), build()
    net = transform(model, mesh=spatial, placements=[Shard(3)], inner_backend="aot_eager", outputs="local")
    whole = image(WIDTH).requires_grad_()
    part = distribute_tensor(whole.detach(), spatial, [Shard(3)], src_data_rank=None).requires_grad_()
    weight = weights(WIDTH)
    loss_of(reference(whole), weight).backward()
    found = net(part)
    split_weight = distribute_tensor(weight, spatial, [Shard(3)], src_data_rank=None)
    total(found["map"] * split_weight).backward(retain_graph=True)
    found["classes"].square().sum().backward()
    assert isinstance(part.grad, DTensor)
    torch.testing.assert_close(part.grad.full_tensor(), whole.grad, rtol=1e-9, atol=1e-9)
    check_trained(model, reference)


def test_dtensors_are_parts(pool: RankPool) -> None:
    pool.run(dtensor_parts, ranks=3)


def changing_parts(rank: int, steps: Sequence[tuple[int, ...]]) -> None:
    """Pass parts whose widths are others on each step (runs in a rank process)."""
    torch.compiler.reset()
    model, reference = build(), build()
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    for widths in steps:
        cuts: Cuts = ((3, (0, *accumulate(widths))),)
        whole = image(cuts).requires_grad_()
        part = cut(whole.detach(), cuts, [rank]).clone().requires_grad_()
        expected, found = reference(whole), net(part)
        torch.testing.assert_close(found["map"], expected["map"], rtol=1e-9, atol=1e-9)
        loss_of(expected, weights(cuts)).backward()
        loss_of(found, weights(cuts)).backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, cut(whole.grad, cuts, [rank]), rtol=1e-9, atol=1e-9)
    check_trained(model, reference)


@pytest.mark.parametrize(
    "steps",
    [((8, 8), (12, 12), (8, 12)), ((8, 8), (8, 15), (8, 8), (8, 15))],
    ids=["each seen before, not together", "one rank's width changes"],
)
def test_the_whole_is_made_of_what_all_ranks_pass_now(pool: RankPool, steps: Sequence[tuple[int, ...]]) -> None:
    pool.run(changing_parts, steps, ranks=2)


def keys_in_store() -> int:
    group = mesh((2,)).get_group()
    dist.barrier(group)
    count: int = _get_default_store().num_keys()
    dist.barrier(group)  # the next step posts again
    return count


def told(rank: int, kind: str) -> tuple[int, int]:
    """Return how often the ranks met in four steps, and how many keys that left in the store."""
    torch.compiler.reset()
    net = transform(build(), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    whole = image(EVEN)
    part: Tensor = distribute_tensor(whole, mesh((2,)), [Shard(3)], src_data_rank=None)
    part = cut(whole, EVEN, [rank]) if kind == "plain" else part
    net(part)
    before, rounds = keys_in_store(), meeting._numbers[0, 1]
    for _ in range(4):
        net(part)
    return meeting._numbers[0, 1] - rounds, keys_in_store() - before


@pytest.mark.parametrize(("kind", "times"), [("plain", 8), ("dtensor", 4)])
def test_plain_parts_are_told_of_on_every_call_and_leave_no_keys(pool: RankPool, kind: str, times: int) -> None:
    assert pool.run(told, kind, ranks=2) == [(times, 0)] * 2


def absent_rank(rank: int) -> tuple[str, str]:
    """Leave rank 1 out of the second step (runs in a rank process)."""
    torch.compiler.reset()
    net = transform(build(), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    part, said = cut(image(EVEN), EVEN, [rank]), ("", "")
    net(part)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "patience_s", lambda: 1.0)
            try:
                net(part)
            except FxShardError as error:
                said = (type(error).__name__, str(error))
    dist.barrier(mesh((2,)).get_group())
    if rank == 1:
        agreement.announce_failure(mesh((2,)), "it did not come", Exception())  # so that the ranks are in step again
    net(part)
    return said


def test_a_rank_that_does_not_come_is_named(pool: RankPool) -> None:
    (kind, text), _ = pool.run(absent_rank, ranks=2)
    assert kind == "RankMismatchError"
    assert text.startswith("rank 1 of the mesh did not call the model within 1 s; at every call the ranks compare")
    assert "end such work with torch.distributed.barrier()" in text


class Conditioned(nn.Module):
    """A map and what it is scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv(x)
        return y if scale is None else y * (scale if scale.ndim == y.ndim else scale.unsqueeze(1))


def dtensor_and_whole(rank: int) -> None:
    """Pass a DTensor and, plain, something of fewer dimensions (runs in a rank process)."""
    torch.compiler.reset()
    model = Conditioned().double()
    net = transform(model, mesh=mesh((3,)), placements=[Shard(2)], inner_backend="eager", inputs="local")
    whole = image(WIDTH)
    scale = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 12, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        found = net(distribute_tensor(whole, mesh((3,)), [Shard(2)], src_data_rank=None), scale)
        torch.testing.assert_close(found, model(whole, scale), rtol=1e-9, atol=1e-9)


def test_what_has_fewer_dimensions_than_a_dtensor_is_whole(pool: RankPool) -> None:
    pool.run(dtensor_and_whole, ranks=3)


def refusal_of(net: nn.Module, *inputs: Tensor) -> str:
    try:
        net(*inputs)
    except PlanError as error:
        return str(error)
    return ""


def another_number_of_parts(rank: int) -> str:
    net = transform(Conditioned(), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    return refusal_of(net, *(torch.zeros(1, 3, 8, 8) for _ in range(1 + rank)))


def test_ranks_that_pass_another_number_of_parts_are_refused(pool: RankPool) -> None:
    for said in pool.run(another_number_of_parts, ranks=2):
        assert said.endswith("None, (1, 3, 8, 8) are no parts of one image: each rank passes a part")


def dtensor_cut_elsewhere(rank: int) -> str:
    """Pass a DTensor whose parts are not those of its placements (runs in a rank process)."""
    whole, spatial = image(WIDTH), mesh((3,))
    part = DTensor.from_local(
        cut(whole, WIDTH, [rank]), spatial, [Shard(3)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return refusal_of(transform(build(), mesh=spatial, placements=[Shard(3)], inner_backend="eager"), part)


def test_a_dtensor_that_is_cut_elsewhere_is_refused(pool: RankPool) -> None:
    for said, width in zip(pool.run(dtensor_cut_elsewhere, ranks=3), (9, 2, 10), strict=True):
        assert f"whose part on this rank has shape (2, 3, 12, {width}), not (2, 3, 12, 7): DTensors are cut" in said


def thin_parts(rank: int, ranks: int) -> None:
    """Pass rows of an image of one column: a whole whose last dimension has no stride to speak of."""
    torch.compiler.reset()
    spatial = mesh((ranks,))
    model, reference = (nn.Conv2d(1, 1, 3, padding=1).double() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    net = transform(model, mesh=spatial, placements=[Shard(2)], inner_backend="eager", inputs="local")
    whole = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(1, 1, 8, 1).requires_grad_()
    part = whole.detach().chunk(ranks, 2)[rank].clone().requires_grad_()
    torch.manual_seed(0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.nn.init.uniform_(p)
        q.data.copy_(p)
    found, expected = net(part), reference(whole)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(part.grad, whole.grad.chunk(ranks, 2)[rank], rtol=1e-9, atol=1e-9)
    check_trained(model, reference)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_image_of_one_column_and_a_mesh_of_one_rank(pool: RankPool, ranks: int) -> None:
    pool.run(thin_parts, ranks, ranks=ranks)


def unfitting_parts(rank: int) -> str:
    """Pass parts of other heights (runs in a rank process)."""
    net = transform(build(), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    try:
        net(torch.zeros(1, 3, 8 + rank, 8).double())
    except FxShardError as error:
        return str(error)
    return ""


def test_parts_that_do_not_fit_are_refused_on_every_rank(pool: RankPool) -> None:
    for said in pool.run(unfitting_parts, ranks=2):
        assert "(1, 3, 8, 8), (1, 3, 9, 8) are no parts of one image" in said


def test_local_inputs_need_placements() -> None:
    with pytest.raises(PlanError, match="of which dimension"):
        transform(build(), inputs="local")


def test_other_words_are_refused() -> None:
    with pytest.raises(PlanError, match="outputs='shards'"):
        transform(build(), outputs="shards")  # type: ignore[arg-type]


def same_parts(rank: int, whole: bool) -> list[str]:
    """Pass one image on both ranks, or its halves, twice (runs in a rank process); return the warnings."""
    net = transform(build(), mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", inputs="local")
    x = torch.randn(1, 3, 8, 16, generator=torch.Generator().manual_seed(0)).double()
    with logged() as said:
        for _ in range(2):
            net(x if whole else x[..., 8 * rank : 8 * rank + 8])
    return [line for line in said if "the same values" in line]


def test_a_whole_image_in_place_of_a_part_is_warned_of_once(pool: RankPool) -> None:
    found = pool.run(same_parts, True, ranks=2)
    assert [len(lines) for lines in found] == [1, 1]
    assert "of shape (1, 3, 8, 16): is that the whole image?" in found[0][0]
    assert pool.run(same_parts, False, ranks=2) == [[], []]

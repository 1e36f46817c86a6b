"""After an error that every rank caught the ranks are in step again, and what they may mix up is an error."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fxshard import backend
from fxshard.api import transform
from fxshard.errors import RankMismatchError
from fxshard.local_io import Entrance
from fxshard.workers import mesh
from tests.ranks.test_agreement import Outcome, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool

LIMIT_S = 10.0
"""No rank waits for one that does not come."""


def image(width: int = 16) -> Tensor:
    return torch.randn(2, 3, 8, width, generator=torch.Generator().manual_seed(1))


def made(spatial: DeviceMesh | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2))
    spatial = spatial or mesh((2,))
    return transform(model, mesh=spatial, placements=[Shard(3)], inner_backend="eager", **options)


def another_width(rank: int, net: nn.Module) -> None:
    net(image(24 if rank else 16))


def no_gradients(rank: int, net: nn.Module) -> None:
    with torch.set_grad_enabled(rank == 0):
        net(image())


def no_memory_while_it_compiles(rank: int, net: nn.Module) -> None:
    def lower(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(backend, "lower", lower)
        net(image())


def one_error_raised_twice(rank: int, net: nn.Module) -> None:
    kept = ValueError("a bad batch")

    def refuse(*_: Any) -> None:
        raise kept

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Entrance, "_parts", refuse)
        assert outcome(partial(net, image())).kind
        net(image())


MISTAKES: list[Callable[[int, nn.Module], None]] = [
    another_width,
    no_gradients,
    no_memory_while_it_compiles,
    one_error_raised_twice,
]


def go_on(rank: int, mistake: Callable[[int, nn.Module], None]) -> list[Outcome]:
    """Make the mistake at the first call, then call rightly (runs in a rank process)."""
    torch.compiler.reset()
    net = made()
    first = outcome(partial(mistake, rank, net))
    calls = [outcome(lambda: torch.testing.assert_close(net(image()), unsplit())) for _ in range(2)]
    with torch.no_grad():
        return [first, *calls, outcome(lambda: torch.testing.assert_close(net(image()), unsplit()))]


def unsplit() -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2))
    result: Tensor = model(image())
    return result


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_next_call_is_right(pool: RankPool, mistake: Callable[[int, nn.Module], None]) -> None:
    for first, *calls in pool.run(go_on, mistake, ranks=2):
        assert first.kind
        assert [found.text for found in calls] == ["", "", ""]
        assert max(found.seconds for found in (first, *calls)) < LIMIT_S


def mix_up(rank: int, what: str) -> str:
    """Call two models of one architecture, and mix them up on rank 1 (runs in a rank process)."""
    torch.compiler.reset()
    first = made()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(-0.5)
    for net in (first, second):
        net(image())
    if rank == 1 and what == "models":
        first, second = second, first
    elif rank == 1:
        first.get_submodule("0").weight = second.get_parameter("0.weight")
    try:
        first(image())
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["models", "parameters"])
def test_models_of_one_architecture_are_not_mixed_up(pool: RankPool, what: str) -> None:
    for text in pool.run(mix_up, what, ranks=2):
        assert "in one order on every rank" in text


def drift(rank: int) -> list[str]:
    """Fail once on rank 1, then let its weights drift (runs in a rank process)."""
    torch.compiler.reset()
    net = made(check_every=2)
    net(image())
    outcome(lambda: net(torch.ones(2, 7 if rank else 3, 8, 16)))
    if rank == 1:
        with torch.no_grad():
            net.get_parameter("0.weight").mul_(3)
    return [outcome(lambda: net(image())).text for _ in range(2)]


def test_a_call_that_failed_does_not_put_the_checks_out_of_step(pool: RankPool) -> None:
    for texts in pool.run(drift, ranks=2):
        assert any("parameter or buffer 0.weight: rank 0 has " in text for text in texts)


def on_two_meshes(rank: int) -> str:
    """Call a model on pairs of ranks, then on all, with other weights on the second pair (runs in a rank process)."""
    torch.compiler.reset()
    torch.manual_seed(rank // 2)
    model = nn.Conv2d(3, 4, 3, padding=1)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))["space"]
    options: Any = {"placements": [Shard(3)], "inner_backend": "eager"}
    transform(model, mesh=pairs, **options)(image())
    return outcome(lambda: transform(model, mesh=mesh((4,)), **options)(image())).text


def test_what_a_part_of_the_ranks_has_compared_all_compare(pool: RankPool) -> None:
    for text in pool.run(on_two_meshes, ranks=4):
        assert "parameter and buffer values: rank 0 has " in text

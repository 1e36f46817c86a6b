"""``check_every``: ranks that hold other parameters, buffers or generator states, or are given other images, are told.

Images are compared at the second, fourth, eighth call, too, and said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard import backend
from fxshard.api import transform
from fxshard.errors import PlanError, RankMismatchError
from fxshard.workers import mesh
from tests.ranks.training import logged

if TYPE_CHECKING:
    from fxshard.workers import RankPool

EVERY = 3


def build(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout))


def told(rank: int, what: str, check_every: int) -> tuple[int, str]:
    """Move rank 1 apart after the first call; return which call raises, and what (runs in a rank process)."""
    torch.compiler.reset()
    model = build()
    net = transform(model, mesh=mesh((2,)), placements=[Shard(3)], inner_backend="eager", check_every=check_every)
    for call in range(1, 2 * EVERY + 1):
        try:
            net(torch.ones(2, 3, 6, 10))
        except RankMismatchError as error:
            return call, str(error)
        if call == 1 and rank == 1:
            with torch.no_grad():
                if what == "parameter":
                    model.get_parameter("0.bias")[2] += 2**-20
                elif what == "buffer":
                    model.get_buffer("1.running_var").mul_(1 + 2**-20)
                elif what == "generator":
                    torch.rand(1)
    return 0, ""


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("parameter", "parameter or buffer 0.bias"),
        ("buffer", "parameter or buffer 1.running_var"),
        ("generator", "generator state"),
    ],
)
def test_ranks_that_moved_apart_are_told_at_the_next_check(pool: RankPool, what: str, name: str) -> None:
    for call, text in pool.run(told, what, EVERY, ranks=2):
        assert call == EVERY
        assert f"{name}: rank 0 has " in text
        assert text.count("rank 0 has ") == 1


def test_ranks_that_hold_the_same_go_on(pool: RankPool) -> None:
    assert pool.run(told, "nothing", EVERY, ranks=2) == [(0, "")] * 2


def test_nothing_is_compared_unless_asked(pool: RankPool) -> None:
    assert pool.run(told, "parameter", 0, ranks=2) == [(0, "")] * 2


def told_of_sums(rank: int) -> tuple[list[str], str]:
    """Train on parts of a batch without a halo, and move rank 1 apart; return the local graph's end and the error."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    options: Any = {"inputs": "local", "outputs": "local", "inner_backend": "eager", "check_every": 2}
    net = transform(model, mesh=mesh((2,)), placements=[Shard(0)], **options)
    targets: list[str] = []

    def observe(_: Any, local: Any, __: Any) -> None:
        targets.extend(str(node.target) for node in local.graph.nodes)

    backend.on_compiled.append(observe)
    try:
        for _ in range(2):
            net(torch.ones(1, 3, 4, 4)).to_local().sum().backward()
            if rank == 1:
                with torch.no_grad():
                    model.get_parameter("0.bias")[2] += 2**-20
    except RankMismatchError as error:
        return targets, str(error)
    finally:
        backend.on_compiled.remove(observe)
    return targets, ""


def test_ranks_that_share_nothing_but_sums_of_gradients_are_compared(pool: RankPool) -> None:
    for targets, said in pool.run(told_of_sums, ranks=2):
        collectives = {target for target in targets if "fxshard" in target}
        assert collectives == {"fxshard.sum_gradient.default"}
        assert "parameter or buffer 0.bias: rank 0 has " in said


def told_of_images(rank: int, check_every: int) -> tuple[int, str, list[str]]:
    """Give rank 1 another image after the first call; return which call raises what, and the log."""
    torch.compiler.reset()
    spatial = mesh((2,))
    net = transform(build(), mesh=spatial, placements=[Shard(3)], inner_backend="eager", check_every=check_every)
    other = transform(build(), mesh=spatial, placements=[Shard(3)], inner_backend="eager")  # its calls are its own
    with logged() as lines:
        for call in range(1, 10):
            try:
                other(torch.ones(2, 3, 6, 10))
                net(torch.full((2, 3, 6, 10), 1.0 + (rank if call > 1 else 0)))
            except RankMismatchError as error:
                return call, str(error), lines
    return 0, "", [line for line in lines if line.startswith("WARNING")]


def test_other_images_in_a_later_step_are_said_by_the_first_rank(pool: RankPool) -> None:
    (call, _, lines), (other_call, _, silence) = pool.run(told_of_images, 0, ranks=2)
    assert (call, other_call, silence) == (0, 0, [])
    assert len(lines) == 3  # at the second, fourth and eighth call
    assert all("results mix the batches.\n  input args[0]: rank 0 has " in line for line in lines)
    assert all("the same batch" in line for line in lines)


def test_other_images_are_an_error_where_a_check_is_asked_for(pool: RankPool) -> None:
    for call, text, _ in pool.run(told_of_images, EVERY, ranks=2):
        assert call == EVERY
        assert "the ranks disagree:\n  input args[0]: rank 0 has " in text
        assert 'inputs="local"' in text


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="is no number of calls"):
        transform(build(), inner_backend="eager", check_every=wrong)  # type: ignore[arg-type]


def first_call_in_an_except_clause(rank: int) -> list[int]:
    """Compile on rank 0 while an exception of the user's is handled, and go on (runs in a rank process)."""
    torch.compiler.reset()
    options: Any = {"mesh": mesh((2,)), "inner_backend": "eager"}
    net, held, sizes = torch.compile(build(0.0), backend="fxshard", options=options), {1: ""}, []
    for width in (10, 12):
        try:
            held[rank]
            sizes.append(net(torch.ones(2, 3, 6, width)).shape[3])
        except KeyError:
            sizes.append(net(torch.ones(2, 3, 6, width)).shape[3])
    return sizes


def test_a_model_may_be_compiled_while_an_exception_is_handled(pool: RankPool) -> None:
    assert pool.run(first_call_in_an_except_clause, ranks=2) == [[10, 12]] * 2

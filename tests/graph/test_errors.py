"""An error that a user sees is short: what happened, and the user's own line; not how torch and fxshard came there."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.errors import CaptureError, FxShardError, InternalError, PlanError
from fxshard.passes import capture, pipeline
from fxshard.passes.spelled_out import SPELLED_OUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

MOST_LINES = 24


class Branches(nn.Module):
    """Looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean() > 0 else x  # the line


def widths_that_differ() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 2))
    fxshard.transform(net, inner_backend="eager")(torch.ones(1, 3, 8, 8))


def a_branch() -> None:
    fxshard.transform(Branches(), inner_backend="eager")(torch.ones(1, 3, 8, 8))


def a_plan_that_does_not_fit() -> None:
    fxshard.plan(nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8), world_size=2, placements=[Shard(5)])


def a_plan() -> None:
    fxshard.plan(nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8), world_size=2)


def an_unknown_option() -> None:
    options: dict[str, Any] = {"placement": [Shard(3)]}
    compiled = torch.compile(nn.Conv2d(3, 4, 3), backend="fxshard", options=options)
    compiled(torch.ones(1, 3, 8, 8))


# what goes wrong, and what is raised
WRONG: dict[Callable[[], None], tuple[type[FxShardError], str]] = {
    widths_that_differ: (CaptureError, "must have same reduction dim"),
    a_branch: (CaptureError, "# the line"),
    a_plan_that_does_not_fit: (PlanError, "name a dim below 4"),
    an_unknown_option: (PlanError, "unknown options"),
}


@pytest.fixture(autouse=True)
def quiet_verbosity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_VERBOSE", raising=False)
    torch.compiler.reset()


def raised_by(call: Callable[[], None], kind: type[FxShardError]) -> FxShardError:
    with pytest.raises(kind) as found:
        call()
    return found.value


@pytest.mark.parametrize("call", WRONG, ids=lambda call: call.__name__)
def test_an_error_is_short(call: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    kind, text = WRONG[call]
    error = raised_by(call, kind)
    before_message = "".join(traceback.format_exception(error)).partition(f"{kind.__name__}: ")[0]
    assert text in str(error)
    assert before_message.count("\n") <= MOST_LINES, before_message
    assert f"in {call.__name__}" in before_message
    assert caplog.text == ""  # torch logs hundreds of lines of what an operator refused


def test_everything_is_there_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    error = raised_by(widths_that_differ, CaptureError)
    assert error.__cause__ is not None
    assert len("".join(traceback.format_exception(error)).splitlines()) > 100


def test_a_bug_keeps_what_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gm: fx.GraphModule, **_options: object) -> fx.GraphModule:
        raise KeyError(gm)

    monkeypatch.setattr(pipeline, "push_splits", broken)
    error = raised_by(a_plan, InternalError)
    assert isinstance(error.__cause__, KeyError)
    assert "in broken" in "".join(traceback.format_exception(error))


def test_a_bug_in_what_spells_an_operator_out_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError

    broken.__code__ = broken.__code__.replace(co_filename=capture.__file__)
    monkeypatch.setitem(SPELLED_OUT, torch.conv2d, broken)
    error = raised_by(a_plan, InternalError)
    assert "conv2d" in str(error)
    assert "cannot be captured: KeyError" in str(error)


def test_torch_still_logs_what_others_run(caplog: pytest.LogCaptureFixture) -> None:
    raised_by(widths_that_differ, CaptureError)
    with caplog.at_level(logging.ERROR):
        logging.getLogger("torch._subclasses.fake_tensor").error("of somebody else")
    assert "of somebody else" in caplog.text

"""The demo without ranks: its judgement, its settings and what it shows."""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType
from torch import nn

from fxshard import demo_arguments, demo_rank
from fxshard.compare import Difference, Mismatch, Worst
from fxshard.demo import judge, make_settings
from fxshard.demo_arguments import add_arguments
from fxshard.demo_rank import Kept, Settings, Side, StepResult, Summary, saved_tensors
from fxshard.demo_screen import Screen, gather_table, loss_table, megabytes, notes, rank_table, verdict
from fxshard.errors import FxShardError
from fxshard.ops import Traffic
from fxshard.report import Communication, NodeReport, PlanReport

COLUMNS = 80


def result(loss: float = 1.0, error: float = 0.0, *mismatches: Mismatch) -> StepResult:
    worst = Worst(error, "step 0, parameter gradient stages.0.blocks.1.conv_dw.weight")
    return StepResult(loss, 1.0, Difference({"parameter gradient": worst}, mismatches))


def summary(kept: int, halo: int, *nodes: NodeReport) -> Summary:
    sent = Communication({"halo": Traffic(1, halo)}, {"halo": Traffic(1, halo), "gradient": Traffic(3, 4_000_000)})
    report = PlanReport((2,), (0,), (NodeReport("conv2d", "aten.conv2d.default", sent=sent), *nodes))
    return Summary(Kept(kept, 1_000_000), Kept(100_000_000, 0), report)


def shown(what: RenderableType) -> str:
    console = Console(width=COLUMNS, file=io.StringIO(), record=True)
    console.print(what)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= COLUMNS
    return text


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize(
    ("wrong", "dtype", "same"),
    [
        (result(), "float64", True),
        (result(1 + 1e-10, 1e-10), "float64", True),
        (result(1 + 1e-8), "float64", False),
        (result(error=1e-8), "float64", False),
        (result(float("nan")), "float64", False),
        (result(error=float("inf")), "float32", False),
        (result(1 + 1e-5, 1e-3), "float32", True),
        (result(1 + 1e-3), "float32", False),
        (result(error=0.1), "float32", False),
        (result(1.0, 0.0, Mismatch("step 0, generator cpu", "another state")), "float32", False),
    ],
)
def test_one_rank_that_differs_after_one_step_is_enough(wrong: StepResult, dtype: str, same: bool) -> None:
    assert judge([[result(), result()], [result(), wrong]], dtype) is same


def test_the_defaults_need_no_gpu_and_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    made = make_settings(arguments())
    assert (made.device, made.inner_backend, made.world_size, made.torchrun) == ("cpu", "eager", 2, False)


def test_gpus_are_used_where_there_is_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert make_settings(arguments()).inner_backend == "inductor"
    assert make_settings(arguments("--world-size", "3")).device == "cpu"


def test_torchrun_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    made = make_settings(arguments("--split", "WxH"))
    assert (made.torchrun, made.world_size, made.mesh_shape) == (True, 6, (2, 3))
    with pytest.raises(FxShardError, match="--world-size 2, but torchrun started 6 ranks"):
        make_settings(arguments("--world-size", "2"))


@pytest.mark.parametrize(("split", "shape"), [("W", (4,)), ("H", (4,)), ("HW", (2, 2))])
def test_the_mesh_fits_the_split(split: str, shape: tuple[int, ...]) -> None:
    made = Settings("model", world_size=4, split=split)
    assert made.mesh_shape == shape
    assert len(made.placements) == len(shape)


def test_losses_are_shown_of_the_rank_that_differs_most() -> None:
    text = shown(loss_table([[result(1.25, 1e-12), result(1.5, 1e-10)]], Settings("model")))
    assert "1.500000000000" in text
    assert "1.25" not in text
    assert "conv_dw.weight" in text


def test_ranks_are_shown_next_to_one_device() -> None:
    text = shown(rank_table(Settings("model"), [summary(51_000_000, 700), summary(52_000_000, 800)]))
    for part in ("100.0 MB", "51.0 MB", "52 %", "1.4 kB", "1.6 kB", "4.0 MB"):
        assert part in text
    assert "gathered" not in text


def test_of_many_ranks_the_least_and_the_most_are_shown() -> None:
    ranks = [summary(kept * 1_000_000, kept) for kept in (14, 12, 13, 15, 11)]
    text = shown(rank_table(Settings("model", world_size=5), ranks))
    assert "rank 3" not in text
    assert "11.0 MB" in text
    assert "15.0 MB" in text


def test_copies_of_parameters_are_said() -> None:
    assert "1.0 MB of copies" in " ".join(notes([summary(1, 1)]).split())


def test_gathers_are_shown_by_reason() -> None:
    gather = Communication({"gather": Traffic(1, 2_000)})
    sort = NodeReport("sort", "aten.sort.default", reason="no rule for aten.sort", module="head", sent=gather)
    output = NodeReport("output", "output", sent=gather)
    table = gather_table(summary(1, 1, sort, replace(sort, name="sort_1"), output).report)
    assert table is not None
    text = shown(table)
    assert "no rule for aten.sort" in text
    assert "4.0 kB" in text
    assert "outputs come back whole" in text
    assert gather_table(summary(1, 1).report) is None


def test_the_verdict_names_what_is_no_rounding() -> None:
    wrong = result(1.0, 0.0, Mismatch("step 0, generator cpu", "another state"))
    text = shown(verdict([[wrong]], (1e-9, 1e-9), same=False))
    assert "The trainings differ" in text
    assert "generator cpu: another state" in " ".join(text.split())


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1_000, "1.0 kB"), (2_500_000_000, "2.5 GB")])
def test_bytes_have_units(count: int, text: str) -> None:
    assert megabytes(count) == text


def test_what_is_kept_for_the_backward_is_counted() -> None:
    linear = nn.Linear(3, 5).double()
    side = Side(nn.Sequential(linear, nn.GELU(), nn.Linear(5, 2).double()))
    side.step(torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), seed=0)
    assert side.kept == Kept(activations=8 * (4 * 3 + 4 * 5 + 4 * 5), parameter_copies=0)


def test_a_saved_copy_of_a_parameter_is_no_activation() -> None:
    class Copied(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return nn.functional.linear(input, self.weight.clone(), self.bias)

    side = Side(Copied(3, 5).double())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with saved_tensors() as saved:
        side.net(x)
    assert len(saved) == 2
    side.step(x, torch.zeros(4, dtype=torch.int64), seed=0)
    assert side.kept == Kept(activations=8 * 4 * 3, parameter_copies=8 * 5 * 3)


def test_what_happens_is_a_line_each_where_nothing_moves() -> None:
    written = io.StringIO()
    with Screen(Settings("model"), Console(width=COLUMNS, file=written)) as screen:
        assert written.getvalue() == "starting 2 ranks ...\n"
        screen.doing("step 1 of 5, which compiles")
        assert written.getvalue().endswith("step 1 of 5, which compiles ...\n")


def test_the_command_line_offers_what_there_is() -> None:
    assert tuple(demo_rank.SPLITS) == demo_arguments.SPLITS
    assert set(demo_arguments.DTYPES) == set(demo_rank.DTYPES)


@pytest.mark.parametrize("text", ["HW", "hxw", "WxH"])
def test_both_axes_have_one_name(text: str) -> None:
    assert arguments("--split", text).split == "HW"

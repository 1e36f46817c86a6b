"""The graph that replace_random leaves, what it reports, and the operators that it emits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxshard.errors import PlanError
from fxshard.ops.random import keep_draws, random
from fxshard.passes.replace_random import AFTER, RANDOM, draws, has_random, replace_random
from tests.graph.random_match import SEED, Compiler, Of, image

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def captured(model: nn.Module, x: Tensor) -> Compiler:
    torch._dynamo.reset()
    compiler = Compiler("eager")
    torch.compile(model, backend=compiler, fullgraph=True)(x)
    return compiler


def test_draws_are_chained_by_their_tokens() -> None:
    compiler = captured(Of(lambda x: F.dropout(x, 0.5) + torch.rand(()) + torch.rand_like(x)), image())
    assert compiler.after is not None
    drawn = [n for n in compiler.after.graph.nodes if n.target is RANDOM]
    assert [n.args[1] for n in drawn] == ["dropout_mask", "uniform", "uniform"]
    assert drawn[0].args[AFTER] is None
    for before, node in itertools.pairwise(drawn):
        token = node.args[AFTER]
        assert isinstance(token, torch.fx.Node)
        assert token.args == (before, 1)


def test_second_run_changes_nothing() -> None:
    def unused_last(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5) * torch.rand(())
        torch.rand(3)
        return y

    graph = captured(Of(unused_last), image()).after
    assert graph is not None
    before = str(graph.graph)
    assert str(replace_random(graph).graph) == before


def test_graph_without_draws_is_left_alone() -> None:
    graph = captured(Of(lambda x: x.relu()), image()).before
    assert graph is not None
    before = str(graph.graph)
    assert not has_random(graph)
    assert str(replace_random(graph).graph) == before


def test_new_nodes_keep_the_source_location() -> None:
    compiler = captured(nn.Sequential(nn.Dropout(0.3), nn.ReLU()), image(torch.float64))
    assert compiler.before is not None
    assert compiler.after is not None
    old = next(n for n in compiler.before.graph.nodes if draws(n))
    added = [n for n in compiler.after.graph.nodes if n.op == "call_function" and n.target is not aten.relu.default]
    assert len(added) == 5
    for node in added:
        assert node.meta["stack_trace"] == old.meta["stack_trace"]
        assert node.meta["nn_module_stack"] == old.meta["nn_module_stack"]
        assert node.meta["val"] is not old.meta["val"]
    assert added[-1].meta["val"].dtype == torch.float64
    assert added[-1].meta["val"].stride() == old.meta["val"].stride()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "gamma": (lambda x: x * torch._standard_gamma(x.abs() + 1), "make it of draws that are known"),
    "dirichlet": (lambda x: x * torch._sample_dirichlet(x.abs() + 1), "make it of draws that are known"),
    "integers": (lambda x: x * torch.randint_like(x, torch.tensor(5)), "make it of draws that are known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_draw_that_is_not_known_is_refused_with_its_line(name: str) -> None:
    function, remedy = REFUSED[name]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        captured(Of(function), image())
    assert isinstance(caught.value.inner_exception, PlanError)
    said = str(caught.value.inner_exception)
    assert remedy in said
    assert "tests/graph/test_random_graph.py" in said
    assert "return self.function(x * self.scale)" not in said.splitlines()[0], "the innermost line is the draw's"


def test_attention_that_draws_in_its_kernel_is_refused_with_the_one_that_does_not() -> None:
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    graph.output(graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.1)))
    with pytest.raises(PlanError, match=r"flash_attention.* in a kernel of its own.*SDPBackend\.MATH"):
        replace_random(GraphModule({}, graph))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.rrelu(x, training=False),
    ],
    ids=["attention", "dropout_eval", "dropout_p0", "rrelu_eval"],
)
def test_nothing_is_drawn_in_evaluation_mode(function: Callable[[Tensor], Any]) -> None:
    graph = captured(Of(function), image()).before
    assert graph is not None
    assert not has_random(graph)


def test_bernoulli_with_p_zero_draws() -> None:
    graph = captured(Of(lambda x: x * torch.empty_like(x).bernoulli_(0.0)), image()).before
    assert graph is not None
    assert has_random(graph)


def test_draws_of_nested_graphs_are_found() -> None:
    inner = torch.fx.Graph()
    inner.output(inner.call_function(aten.rand.default, ([2],)))
    outer = torch.fx.Graph()
    outer.output(outer.get_attr("body"))
    nested = torch.fx.GraphModule({"body": torch.fx.GraphModule({}, inner)}, outer)
    assert has_random(nested)
    with pytest.raises(PlanError, match=r"aten\.rand\.default draws in a branch or a loop at .*; draw before it"):
        replace_random(nested)


def test_a_draw_from_a_generator_of_its_own_is_refused() -> None:
    graph = torch.fx.Graph()
    generator = graph.placeholder("generator")
    graph.output(graph.call_function(aten.rand.generator, ([5],), {"generator": generator}))
    with pytest.raises(
        PlanError, match=r"aten\.rand\.generator draws from a generator of its own at .*; draw without generator="
    ):
        replace_random(GraphModule({}, graph))


CPU = torch.device("cpu")
OPERATOR_CASES = {
    "fill": ([], "uniform", [0.0, 1.0], [2, 3], [3, 1], torch.float32, CPU, None),
    "mask": ([], "dropout_mask", [0.5, 1], [2, 3], [1, 2], torch.float64, CPU, None),
    "not_dense": ([], "normal", [0.0, 1.0], [2, 3], [8, 2], torch.float32, CPU, None),
    "given": (
        [torch.full((2, 3), 0.5, requires_grad=True)],
        "bernoulli_of",
        [],
        [2, 3],
        [3, 1],
        torch.float32,
        CPU,
        None,
    ),
    "permutation": ([], "randperm", [6], [6], [1], torch.int64, CPU, None),
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", OPERATOR_CASES)
def test_random_operator_is_registered_right(case: str) -> None:
    torch.library.opcheck(random, OPERATOR_CASES[case], test_utils=CHECKS)


def test_keep_draws_is_registered_right() -> None:
    torch.library.opcheck(
        keep_draws, (torch.ones(2, 3, requires_grad=True), torch.empty(0, dtype=torch.int8)), test_utils=CHECKS
    )


def test_unaligned_blank_is_drawn_like_the_aligned_one_on_cpu() -> None:
    torch.manual_seed(SEED)
    mask, _ = random([], "native_dropout_mask", [0.5, 3], [2, 9], [9, 1], torch.float32, CPU, None)
    torch.manual_seed(SEED)
    assert torch.equal(mask, torch.native_dropout(torch.ones(2, 9), 0.5, True)[1])


def test_unknown_draw_raises() -> None:
    with pytest.raises(KeyError, match="roulette"):
        random([], "roulette", [], [1], [1], torch.float32, CPU, None)

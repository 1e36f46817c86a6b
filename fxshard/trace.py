"""What training steps of a model leave behind: everything that a transformed model must reproduce.

A :class:`Case` says how to build a model and its inputs; :func:`run_steps` trains it a little and keeps, per step::

    outputs     y = model(x)
    gradients   of L = sum over floating outputs of <y, c>, c a fixed random cotangent, for each input and parameter
    buffers     running statistics and counters, after the step
    generators  the state that the step left the random generators in

then updates the parameters by plain gradient descent, so that the next step runs with other weights.  The rate is
relative, ``p -= RATE * max|p| / max|g| * g`` with the maxima over all parameters and gradients: the weights change by
about one per cent and rounding is not amplified, whatever the model's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.distributed.tensor.placement_types import Placement

Inputs: TypeAlias = tuple[Any, ...] | dict[str, Any]
"""Positional or keyword arguments of a model."""

RATE = 1e-2
"""How far a step moves the weights, relative to the largest weight."""

_COTANGENT_SEED = 0x5EED


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and how it is transformed.

    Args:
        build: Top-level function that returns the model and its inputs, a tuple of positional or a dict of keyword
            arguments.  It is called with the seed set and builds in the default dtype; floating tensors are then
            converted, so that every ``dtype`` has the same weights.
        placements: As :func:`fxshard.transform` takes them.
        mesh_shape: Ranks per mesh axis.
        inner_backend: The Dynamo backend that runs the local graph.
        options: Further keyword arguments of ``fxshard.transform``.
        seed: Set before the build and again before the steps.
        dtype: Of the floating parameters, buffers and inputs.
        steps: How many training steps, >= 1.
        training: ``model.train()`` or ``model.eval()``.
        no_grad: Run under ``torch.no_grad()``: no gradients, no update.
        loss: Scalar loss of the outputs; None is :func:`cotangent_loss`.
        device: ``"cpu"`` or ``"cuda"`` (the current one).
        reference_backend: The Dynamo backend that the untouched model is compiled with, None for eager mode: an
            activation checkpoint updates running statistics twice in eager mode, once when compiled.
    """

    build: Callable[[], tuple[nn.Module, Inputs]]
    placements: tuple[Placement, ...] | Mapping[str, Any] | None = (Shard(3),)
    mesh_shape: tuple[int, ...] = (2,)
    inner_backend: str = "eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: torch.dtype = torch.float64
    steps: int = 2
    training: bool = True
    no_grad: bool = False
    loss: Callable[[Any], Tensor] | None = None
    device: str = "cpu"
    reference_backend: str | None = None


@dataclass(frozen=True)
class Step:
    """What one step left behind, on the CPU, by name.

    Args:
        outputs: The leaves of the output; tensors or plain Python values.
        input_gradients: Of each floating input, None where autograd gave none.
        parameter_gradients: Of each parameter, None where autograd gave none.
        buffers: After the step.
        generators: The states of the random generators after the step, by device.
    """

    outputs: dict[str, Any]
    input_gradients: dict[str, Tensor | None]
    parameter_gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    generators: dict[str, Tensor]


@dataclass(frozen=True)
class Trace:
    """The steps of one run."""

    steps: tuple[Step, ...]


def build_model(case: Case) -> tuple[nn.Module, Inputs]:
    """Return the untouched model and its inputs, seeded, converted and in the case's mode."""
    torch.manual_seed(case.seed)
    model, inputs = case.build()
    return (
        model.to(device=case.device, dtype=case.dtype).train(case.training),
        map_leaves(lambda leaf: _convert(leaf, case), inputs),
    )


def run_steps(model: nn.Module, inputs: Inputs, case: Case) -> Trace:
    """Run the case's steps on ``model`` and return what each left behind.

    Args:
        model: The untouched or the transformed model; its parameters and buffers are changed.
        inputs: Tuple of positional or dict of keyword arguments; not changed.
        case: Says the seed, steps, loss and mode.

    Example:
        >>> case = Case(build=lambda: (torch.nn.ReLU(), (torch.tensor([-1.0, 2.0]),)), steps=1, no_grad=True)
        >>> run_steps(*build_model(case), case).steps[0].outputs
        {'output': tensor([0., 2.], dtype=torch.float64)}
    """
    torch.manual_seed(case.seed)
    return Trace(tuple(_run_step(model, inputs, case) for _ in range(case.steps)))


def _run_step(model: nn.Module, inputs: Inputs, case: Case) -> Step:
    model.zero_grad(set_to_none=True)
    leaves = map_leaves(lambda leaf: _fresh_input(leaf, case), inputs)
    with torch.no_grad() if case.no_grad else nullcontext():
        outputs = model(**leaves) if isinstance(leaves, dict) else model(*leaves)
    whole = map_leaves(_whole, outputs)
    if not case.no_grad:
        loss = cotangent_loss(whole) if case.loss is None else case.loss(whole)
        if loss.requires_grad:
            loss.backward()
    step = _record(model, leaves, whole, case)
    _update(model)
    return step


def _record(model: nn.Module, inputs: Any, outputs: Any, case: Case) -> Step:
    leaves = () if case.no_grad else named_leaves(inputs, "input")
    parameters = () if case.no_grad else model.named_parameters()
    return Step(
        outputs={name: _keep(leaf) for name, leaf in named_leaves(outputs, "output")},
        input_gradients={name: _keep(leaf.grad) for name, leaf in leaves if _is_floating(leaf)},
        parameter_gradients={name: _keep(parameter.grad) for name, parameter in parameters},
        buffers={name: _keep(buffer) for name, buffer in model.named_buffers()},
        generators=_generator_states(case.device),
    )


def _update(model: nn.Module) -> None:
    trained = [(p, p.grad) for p in model.parameters() if p.grad is not None and p.numel()]
    largest = max((float(g.abs().max()) for _, g in trained), default=0.0)
    if largest == 0:
        return
    rate = RATE * max(float(p.detach().abs().max()) for p, _ in trained) / largest
    with torch.no_grad():
        for parameter, gradient in trained:
            parameter.sub_(gradient, alpha=rate)


def cotangent_loss(outputs: Any) -> Tensor:
    """Return the sum over the floating outputs of ``(output * cotangent).sum()``.

    The cotangents are random, so that no part of a gradient cancels, and come from a generator of their own, so that
    the model's draws are not disturbed.

    Args:
        outputs: A tensor or nested containers of them.

    Example:
        >>> bool(cotangent_loss(torch.ones(3)) == cotangent_loss({"a": torch.ones(3)}))
        True
    """
    generator = torch.Generator().manual_seed(_COTANGENT_SEED)
    loss = torch.zeros(())
    for _, leaf in named_leaves(outputs, "output"):
        if _is_floating(leaf):
            cotangent = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            loss = loss.to(leaf.device) + (leaf * cotangent.to(leaf)).sum()
    return loss


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, leaf)`` for the leaves of nested containers.

    Args:
        tree: Mappings, lists, tuples and dataclasses are containers; all else is a leaf.
        name: The name of the whole.

    Example:
        >>> list(named_leaves({"a": [1, 2]}, "x"))
        [("x['a'][0]", 1), ("x['a'][1]", 2)]
    """
    if isinstance(tree, Mapping):
        parts = [(f"{name}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [(f"{name}[{index}]", value) for index, value in enumerate(tree)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [(f"{name}.{part.name}", getattr(tree, part.name)) for part in fields(tree)]
    else:
        yield name, tree
        return
    for part_name, part in parts:
        yield from named_leaves(part, part_name)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to each leaf; mappings, tuples and lists become plain ones.

    Example:
        >>> map_leaves(lambda x: x + 1, {"a": (1, 2)})
        {'a': (2, 3)}
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return {part.name: map_leaves(function, getattr(tree, part.name)) for part in fields(tree)}
    return function(tree)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _convert(leaf: Any, case: Case) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(case.device, case.dtype) if leaf.is_floating_point() else leaf.to(case.device)


def _fresh_input(leaf: Any, case: Case) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point() and not case.no_grad)


def _whole(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _keep(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _generator_states(device: str) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        states[device] = torch.cuda.get_rng_state()
    return states

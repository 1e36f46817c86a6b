"""Training steps with inputs that are passed as they are: strides, expanded dimensions and all.

:func:`fxshard.compare.run_steps` copies its inputs, and a copy is contiguous.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fxshard import backend
from fxshard.api import transform
from fxshard.trace import cotangent_loss, map_leaves, named_leaves
from fxshard.workers import mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RATE = 0.05


def through_transform(model: nn.Module, **options: Any) -> nn.Module:
    return transform(model, **{"placements": [Shard(3)], "inner_backend": "eager", **options})


def through_compile(model: nn.Module, **options: Any) -> nn.Module:
    """Compile in place: the parameters keep their names."""
    model.compile(backend="fxshard", options={"placements": [Shard(3)], "inner_backend": "eager", **options})
    return model


WAYS: dict[str, Callable[..., nn.Module]] = {"transform": through_transform, "compile": through_compile}


def pair(build: Callable[[], nn.Module], way: str, ranks: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model of doubles as it is, and one that runs over the ranks of a mesh (in a rank process)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    reference = build().double()
    torch.manual_seed(0)
    return reference, WAYS[way](build().double(), **{"mesh": mesh((ranks,)), **options})


def image(*shape: int, seed: int = 0) -> Tensor:
    """Return doubles of a normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(net: nn.Module, inputs: Any, *, gradients: bool = True) -> dict[str, Any]:
    """Train a step, and return what it left behind, by name.

    Args:
        net: Is changed.
        inputs: A tuple of positional or a dict of keyword arguments.
        gradients: Whether floating inputs get a gradient.
    """

    def leaf(value: Any) -> Any:
        as_it_is = not isinstance(value, Tensor) or not value.is_floating_point()
        return value if as_it_is else value.detach().requires_grad_(gradients)

    torch.manual_seed(0)
    net.zero_grad()
    given = map_leaves(leaf, inputs)
    outputs = net(**given) if isinstance(given, dict) else net(*given)
    loss = cotangent_loss(outputs)
    if loss.requires_grad:
        loss.backward()
    found = {name: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for name, leaf in _named(net, outputs)}
    found |= {f"gradient of {n}": v.grad for n, v in named_leaves(given, "input") if isinstance(v, Tensor)}
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
    return found


def _named(net: nn.Module, outputs: Any) -> list[tuple[str, Any]]:
    return [
        *named_leaves(outputs, "output"),
        *((f"gradient of {n}", p.grad) for n, p in net.named_parameters()),
        *(net.named_buffers()),
    ]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two steps left the same behind, and that what is no number is so at the same places."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            where = f"{name}: {{}}".format
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, equal_nan=True, msg=where)
        else:
            assert found[name] == value, name


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def logged() -> Iterator[list[str]]:
    """Give the list that the lines of fxshard's log are put in, with their levels."""
    log, kept = logging.getLogger("fxshard"), _Kept()
    before = log.level, log.propagate
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield kept.lines
    finally:
        log.removeHandler(kept)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def compilations() -> Iterator[list[int]]:
    """Give the list that has an entry for each graph that is compiled meanwhile."""
    found: list[int] = []

    def observe(*_: Any) -> None:
        found.append(1)

    backend.on_compiled.append(observe)
    try:
        yield found
    finally:
        backend.on_compiled.remove(observe)

"""One model on ranks against itself: is it exact, and if not, is that more than its own rounding.

Some untrained networks amplify rounding: batch norm over a few pixels divides by what nearly cancels, and thirty such
layers make 1e-9 of 1e-16.  The control is the untouched model itself with what Monte Carlo arithmetic does to it
(Parker, 1997): weights, image and the result of each operation are moved by one unit in the last place of their dtype,
up or down at random, and with them the gradients on their way back::

    own error = difference(model, model with v -> v (1 + s eps))       s random signs, eps = 2.2e-16 in float64

Ranks that take a sum of n terms in another order move its value by about sqrt(n) eps, the control by one.  An error
that is at most :data:`FACTOR` times the control's, kind by kind, is the model's own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxshard.compare import Case, Difference, compare_on_rank, difference
from fxshard.trace import build_model, map_leaves, run_steps
from tools.zoo.models import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxshard.workers import RankPool
    from tools.zoo.verdict import Setting

LIMIT = 1e-9
"""The contract's for float64."""
FACTOR = 10.0
DRAWS = 3
"""How many perturbations the control takes the largest error of."""


@dataclass(frozen=True)
class Finding:
    """What the comparison says.

    Args:
        exact: Whether all is equal to :data:`LIMIT` on every rank.
        error: The largest relative error.
        own_error: The control's, None where it was not needed.
        excused: Whether the error is the model's own rounding.
        text: The table of differences, empty where all is exact.
    """

    exact: bool
    error: float
    own_error: float | None = None
    excused: bool = False
    text: str = ""


def check(pool: RankPool, name: str, setting: Setting, *, timeout_s: float) -> Finding:
    """Run one training step of a model on ranks and on one device in float64, and compare.

    Args:
        pool: At least as many ranks as the setting has.
        name: The model.
        setting: The mesh and the image's size.
        timeout_s: For the comparison, in seconds; the control may take as long again.

    Raises:
        WorkerError: The model cannot run.
    """
    case = Case(functools.partial(build, name, setting.size), setting.placements(name), setting.mesh, steps=1)
    found = pool.run(compare_on_rank, case, ranks=math.prod(setting.mesh), timeout_s=timeout_s)
    worst: Difference = max(found, key=lambda d: (bool(d.mismatches), d.error))
    if worst.exact(LIMIT):
        return Finding(True, worst.error)
    (own,) = pool.run(own_rounding, case, ranks=1, timeout_s=timeout_s)
    excused = not worst.mismatches and all(
        w.error <= max(LIMIT, FACTOR * own.worst[kind].error) for kind, w in worst.worst.items()
    )
    return Finding(
        False,
        worst.error,
        own.error,
        excused,
        f"{worst}\nuntouched, each result moved by one unit in the last place\n{own}",
    )


def own_rounding(rank: int, case: Case) -> Difference:
    """Return how far the untouched model is from itself with every result moved by one unit in the last place.

    Args:
        rank: Not used: it runs on one rank.
        case: What to build; placements do not matter.
    """
    del rank
    reference = run_steps(*build_model(case), case)
    found = []
    for seed in range(DRAWS):
        model, inputs = build_model(case)
        with MonteCarlo(seed) as arithmetic:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(arithmetic.moved(parameter))
            found.append(difference(reference, run_steps(model, map_leaves(arithmetic.moved, inputs), case)))
    kinds = found[0].worst
    return Difference({kind: max((d.worst[kind] for d in found), key=lambda w: w.error) for kind in kinds})


class MonteCarlo(TorchFunctionMode):
    """Moves each floating result of a torch function by one unit in the last place, up or down at random.

    Args:
        seed: Of the signs; torch's own generator is not touched.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and move what it makes; what it only views or writes to in place is left alone."""
        result = func(*args, **kwargs or {})
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not given or not isinstance(result, torch.Tensor) or result.grad_fn is None or result._is_view():
            return result
        return result if any(result is value for value in given) else self.moved(result)

    def moved(self, value: Any) -> Any:
        """Return a floating tensor moved; anything else as it is."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int8) * 2 - 1
        return value * (1 + signs.to(value.dtype) * torch.finfo(value.dtype).eps)

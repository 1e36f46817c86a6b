"""``fxshard.verify``: real ranks against the untouched model, as a report that a script can act on.

Rank processes are started on this machine; each trains the untouched model on its own and the sharded one with the
others, and compares what they leave behind (:mod:`fxshard.trace`)::

    float64    outputs, gradients, buffers within 1e-9, generators equal                    (the contract)
    others     no further from the float64 model than twice the untouched model in this type is

Where they differ, :mod:`fxshard.bisect` names the first node that does.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fxshard.bisect import Culprit, bisect_on_rank, first_of
from fxshard.compare import KINDS, Difference, difference, transformed, within_own_rounding
from fxshard.errors import FxShardError
from fxshard.model_inputs import FLOATING
from fxshard.options import check_choices, mesh_shape_of
from fxshard.provenance import frame_line, users_frame
from fxshard.trace import Case, Trace, build_model, run_steps
from fxshard.workers import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from fxshard.trace import Inputs

DTYPES = {name: getattr(torch, name) for name in FLOATING}


@dataclass(frozen=True)
class Verification:
    """What the ranks found.

    Args:
        world_size: How many ranks.
        judged: Whether each rank's model is the untouched one, by dtype.
        differences: Each rank's differences from the untouched model in float64, by dtype.
        rounding: The untouched model's own, by dtype; none in float64.
        culprit: The first node that differs on some rank; None where none was looked for.
        bisected: Whether one was looked for.
    """

    world_size: int
    judged: dict[str, tuple[bool, ...]]
    differences: dict[str, tuple[Difference, ...]]
    rounding: dict[str, Difference]
    culprit: Culprit | None = None
    bisected: bool = False

    @property
    def exact(self) -> bool:
        """Whether the contract holds on every rank."""
        return all(all(each) for each in self.judged.values())

    def __str__(self) -> str:
        lines = [f"{self.world_size} ranks against one device: {'the same' if self.exact else 'NOT THE SAME'}"]
        lines += [f"{'':<10}" + "".join(f"{kind:>20}" for kind in KINDS)]
        for dtype, found in self.differences.items():
            worst = [max((d.worst[kind] for d in found), key=lambda w: (w.error, w.where)) for kind in KINDS]
            verdict = "" if all(self.judged[dtype]) else "  differs"
            lines.append(f"{dtype:<10}" + "".join(f"{w!s:>20}" for w in worst) + verdict)
            if dtype in self.rounding:
                own = [self.rounding[dtype].worst[kind] for kind in KINDS]
                lines.append("its own".ljust(10) + "".join(f"{w!s:>20}" for w in own))
        for dtype, found in self.differences.items():
            for rank, each in enumerate(found):
                if not self.judged[dtype][rank]:
                    lines += ["", f"rank {rank}, {dtype}", str(each)]
        if self.culprit is not None:
            lines += ["", str(self.culprit)]
        elif self.bisected:
            lines += ["", "run node by node no rank differs: no node can be named"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the verification as JSON: ``exact``, ``world_size``, errors by dtype, rank and kind, ``culprit``.

        An error is null where there is no tensor of the kind.
        """
        errors = {
            dtype: [
                {
                    kind: {"error": w.error if w.where else None, "tensor": w.where or None}
                    for kind, w in d.worst.items()
                }
                | {"mismatches": list(map(str, d.mismatches))}
                for d in found
            ]
            for dtype, found in self.differences.items()
        }
        culprit = None if self.culprit is None else vars(self.culprit)
        table = {"exact": self.exact, "world_size": self.world_size, "errors": errors, "culprit": culprit}
        return json.dumps(table, indent=1)


def verify(  # noqa: PLR0913  options
    model: nn.Module | Callable[[], tuple[nn.Module, Inputs]],
    inputs: torch.Tensor | Inputs | None = None,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    inner_backend: str = "eager",
    dtypes: Sequence[Literal["float64", "float32", "bfloat16", "float16"]] = ("float64",),
    steps: int = 2,
    training: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    bisect: bool = False,
    timeout_s: float = 600,
) -> Verification:
    """Train ``model`` for a few steps sharded over real ranks and untouched, and compare.

    Rank processes are started on this machine, so a script that calls it needs ``if __name__ == "__main__":`` around
    what it does.  Every rank compares outputs, gradients of inputs and parameters, buffers and generator states after
    each step: in float64 each tensor within 1e-9 of its largest element, in another type no further from the float64
    model than twice the untouched model in this type is.

    Args:
        model: A module that can be pickled, in the mode (train or eval) that is to be verified; or a top-level
            function that returns a module and its inputs.
        inputs: What its forward takes: a tensor, a tuple, or a dict of keyword arguments.
        world_size: How many ranks share an image, for a mesh of one axis.
        mesh_shape: Ranks on each mesh axis, in place of ``world_size``.
        placements: As for :func:`fxshard.transform`.
        inner_backend: As for :func:`fxshard.transform`.
        dtypes: What to verify in.
        steps: Training steps, >= 1; each changes the weights.
        training: The mode of what a function returns; a module keeps its own.
        device: Gloo ranks, or ranks on GPUs by NCCL; where there are more ranks than GPUs they share them.
        bisect: Whether to look for the first node that differs, where something does.
        timeout_s: The longest that the ranks may take, in seconds.

    Returns:
        What every rank found.

    Raises:
        PlanError: An option is not known, or the mesh has no ranks.
        FxShardError: The mesh does not fit, or a rank failed; with what each of them raised.

    Example:
        >>> found = verify(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 16), world_size=2)  # doctest: +SKIP
        >>> found.exact  # doctest: +SKIP
        True
    """
    check_choices({"inner_backend": inner_backend})
    shape = mesh_shape_of(world_size, mesh_shape)
    build: Any = functools.partial(_copied, model, inputs) if isinstance(model, torch.nn.Module) else model
    training = model.training if isinstance(model, torch.nn.Module) else training
    case = Case(
        build,
        None if placements is None else tuple(placements),
        shape,
        inner_backend,
        steps=steps,
        training=training,
        device=device,
    )
    with RankPool(math.prod(shape), device=device, timeout_s=timeout_s, meshes=[shape]) as pool:
        found = {name: pool.run(_compare, case, name) for name in dtypes}
        judged: dict[str, tuple[bool, ...]] = {name: tuple(each.same for each in all_) for name, all_ in found.items()}
        culprits: list[Culprit | None] = []
        if bisect and not all(all(each) for each in judged.values()):
            culprits = pool.run(bisect_on_rank, case)
    culprit = first_of(culprits)
    differences: dict[str, tuple[Difference, ...]] = {n: tuple(e.difference for e in all_) for n, all_ in found.items()}
    rounding: dict[str, Difference] = {n: all_[0].rounding for n, all_ in found.items() if all_[0].rounding is not None}
    return Verification(math.prod(shape), judged, differences, rounding, culprit, bisected=bool(culprits))


def _copied(model: nn.Module, inputs: torch.Tensor | Inputs | None) -> tuple[nn.Module, Inputs]:
    given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return copy.deepcopy(model), () if given is None else given


@dataclass(frozen=True)
class _Compared:
    """What one rank found in one dtype."""

    same: bool
    difference: Difference
    rounding: Difference | None = None


def _compare(rank: int, case: Case, dtype: str) -> _Compared:
    """Compare this rank's sharded model with the untouched one (runs in a rank process)."""
    del rank
    torch.compiler.reset()
    case, truth = _of_dtype(case, dtype), _of_dtype(case, "float64")
    expected = untouched(truth)
    model, inputs = build_model(case)
    sharded = run_steps(transformed(model, case), inputs, case)
    found = difference(expected, sharded, dtypes=dtype == "float64")
    if dtype == "float64":
        return _Compared(found.exact(), found)
    reference = untouched(case)
    same = within_own_rounding(expected, reference, sharded, case.dtype)
    return _Compared(same, found, difference(expected, reference, dtypes=False))


def untouched(case: Case) -> Trace:
    """Return what the untouched model does.

    Args:
        case: Its model, inputs and dtype.

    Raises:
        FxShardError: It does not run; with the user's line.
    """
    try:
        return run_steps(*build_model(case), case)
    except Exception as error:
        frame = users_frame(traceback.extract_tb(error.__traceback__))
        line = "" if frame is None else f"\n  at {frame_line(frame)}"
        dtype = str(case.dtype).removeprefix("torch.")
        msg = (
            f"the untouched model does not run: {type(error).__name__}: {error}{line}\nit and its floating inputs are "
            f"in {dtype} here; where it makes numbers of its own, give them that of its weights (x.to(weight.dtype))"
        )
        raise FxShardError(msg) from error


def _of_dtype(case: Case, dtype: str) -> Case:
    return replace(case, dtype=DTYPES[dtype])

"""How far a transformed model is from the untouched one.

Two traces of the same steps are compared tensor by tensor, by the contract

    error = max|a - b| / max|a|         a from the reference, b from the other

A tensor whose true value is zero (a bias before batch norm has no gradient) is only rounding noise: its own size says
nothing.  It is judged against the largest of its kind, all gradients being one kind::

    max|a| <= limit * largest           ->      error = max|a - b| / (1e-4 * largest)

and is listed apart as *vanishing*, so that its large error does not hide others'.  Integers, flags, shapes, dtypes,
missing gradients and generator states have no rounding: they are equal, or a mismatch.

In float64 the errors must be rounding, at most 1e-9 (:meth:`Difference.exact`); in another type at most twice what
the untouched model's own rounding is against float64 (:func:`within_own_rounding`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from fxshard.api import transform
from fxshard.ops.memory import same_strides
from fxshard.trace import Case, Step, Trace, build_model, run_steps
from fxshard.workers import mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

__all__ = [
    "Case",
    "Difference",
    "Mismatch",
    "Trace",
    "Worst",
    "compare_models",
    "compare_on_rank",
    "difference",
    "rounding_floor",
    "run_steps",
    "transformed",
    "within_own_rounding",
]

Kind: TypeAlias = Literal["output", "input gradient", "parameter gradient", "buffer", "vanishing"]

KINDS: tuple[Kind, ...] = ("output", "input gradient", "parameter gradient", "buffer", "vanishing")
VANISHING_SCALE = 1e-4
"""A tensor whose true value is zero is judged against this part of the largest of its kind."""
LEAST_SIZE = 1e-6
"""What is smaller, relative to the largest, counts as zero: timm's hgnetv2_b0 against itself with the batch in another
order differs by 2.5e-8 of a gradient of size 5e-9, inception_next_atto by 2.2e-7 of one of size 8e-10."""

_OTHER_VALUES = "other values, where rounding is no excuse"


@dataclass(frozen=True)
class Worst:
    """The largest relative error of a kind, and which tensor has it (empty when none was compared)."""

    error: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return f"{self.error:.1e}" if self.where else "-"


@dataclass(frozen=True)
class Mismatch:
    """Something that is not a matter of rounding.

    Args:
        where: The step and the tensor's name.
        reason: What is wrong with it.
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Difference:
    """The worst relative errors of a trace against a reference.

    Args:
        worst: For each kind, the largest error.
        mismatches: What differs by more than rounding can.
        strides: Tensors that lie differently in memory; said, not judged.
    """

    worst: dict[Kind, Worst] = field(default_factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    strides: tuple[Mismatch, ...] = ()

    @property
    def error(self) -> float:
        """The largest relative error of all kinds."""
        return max((worst.error for worst in self.worst.values()), default=0.0)

    def exact(self, tolerance: float = 1e-9) -> bool:
        """Return whether nothing but rounding differs.

        Args:
            tolerance: The largest relative error that is rounding; the contract's for float64.
        """
        return not self.mismatches and self.error <= tolerance

    def __str__(self) -> str:
        lines = [f"{'kind':<20}{'worst error':>12}  tensor"]
        lines += [f"{kind:<20}{worst!s:>12}  {worst.where}".rstrip() for kind, worst in self.worst.items()]
        lines += [f"mismatch  {mismatch}" for mismatch in self.mismatches]
        lines += [f"note      {note}" for note in self.strides]
        return "\n".join(lines)


def difference(reference: Trace, other: Trace, *, dtypes: bool = True) -> Difference:
    """Return how far ``other`` is from ``reference``.

    Args:
        reference: The untouched model's trace.
        other: The trace in question, of as many steps.
        dtypes: Whether another dtype is a mismatch.

    Example:
        >>> from torch import nn, ones
        >>> case = Case(build=lambda: (nn.Linear(2, 2), (ones(3, 2),)))
        >>> trace = run_steps(*build_model(case), case)
        >>> difference(trace, trace).exact(0.0)
        True
    """
    findings = _Findings(dtypes)
    for number, (expected, found) in enumerate(zip(reference.steps, other.steps, strict=True)):
        _compare_step(findings, f"step {number}", expected, found)
    return Difference(findings.worst, tuple(findings.mismatches), tuple(findings.strides))


def compare_models(case: Case, change: Callable[[nn.Module], nn.Module]) -> Difference:
    """Return how far the transformed model is from the untouched one.

    Args:
        case: Builds both, from the same seed.
        change: Takes the untouched model, returns what is to behave like it.
    """
    torch.compiler.reset()  # what was compiled for the last case counts against the recompile limit
    model, inputs = build_model(case)
    if case.reference_backend is not None:
        model.compile(backend=case.reference_backend, fullgraph=True, dynamic=False)
    reference = run_steps(model, inputs, case)
    model, inputs = build_model(case)
    return difference(reference, run_steps(change(model), inputs, case))


def compare_on_rank(rank: int, case: Case) -> Difference:
    """Return how far the model sharded over ranks is from the untouched one, as this rank sees it.

    Runs in every rank of the case's mesh: ``pool.run(compare_on_rank, case, ranks=prod(case.mesh_shape))``.

    Args:
        rank: Not used: every rank must see the same as one device.
        case: What to build and how to transform it.
    """
    del rank
    return compare_models(case, lambda model: transformed(model, case))


def transformed(model: nn.Module, case: Case) -> nn.Module:
    """Return the model transformed as the case says (in a rank process); what was compiled before is forgotten.

    Args:
        model: The untouched model.
        case: Says the mesh, the placements and the options.
    """
    torch.compiler.reset()
    return transform(
        model,
        mesh=mesh(case.mesh_shape),
        placements=list(case.placements) if isinstance(case.placements, tuple) else case.placements,
        inner_backend=case.inner_backend,
        **case.options,
    )


def rounding_floor(case: Case) -> Difference:
    """Return the error of the untouched float32 model against the untouched float64 model.

    A model that draws floating random numbers (``rand``, not ``bernoulli``) draws others in another dtype and has no
    such floor.

    Args:
        case: Its ``dtype`` does not matter.
    """
    return difference(_untouched(case, torch.float64), _untouched(case, torch.float32), dtypes=False)


def within_own_rounding(truth: Trace, reference: Trace, sharded: Trace, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the sharded model's error in a type is at most twice the untouched model's own.

    One unit of rounding is no error.  Where the true value is zero it is one of the largest tensor of the kind: what is
    there is the rounding of sums as large as that one's, and another order of a sum gives another.

    Args:
        truth: The untouched model in float64.
        reference: The untouched model in ``dtype``: its error is rounding.
        sharded: The sharded model in ``dtype``.
        dtype: Floating.
    """
    floor = difference(truth, reference, dtypes=False)
    found = difference(truth, sharded, dtypes=False)
    hard = [m for m in difference(reference, sharded).mismatches if m.reason != _OTHER_VALUES]
    if hard or not set(found.mismatches) <= set(floor.mismatches):
        return False
    unit = torch.finfo(dtype).eps
    least = {kind: unit / (VANISHING_SCALE if kind == "vanishing" else 1) for kind in KINDS}
    return all(found.worst[kind].error <= 2 * floor.worst[kind].error + least[kind] for kind in KINDS)


def _untouched(case: Case, dtype: torch.dtype) -> Trace:
    case = dataclasses.replace(case, dtype=dtype)
    return run_steps(*build_model(case), case)


@dataclass
class _Findings:
    """What the comparison has found so far."""

    dtypes: bool
    worst: dict[Kind, Worst] = field(default_factory=lambda: dict.fromkeys(KINDS, Worst()))
    mismatches: list[Mismatch] = field(default_factory=list)
    strides: list[Mismatch] = field(default_factory=list)

    def add_error(self, kind: Kind, where: str, error: float) -> None:
        if not self.worst[kind].where or error > self.worst[kind].error:
            self.worst[kind] = Worst(error, where)

    def add_mismatch(self, where: str, reason: str) -> None:
        self.mismatches.append(Mismatch(where, reason))


def _compare_step(findings: _Findings, step: str, expected: Step, found: Step) -> None:
    tables: tuple[tuple[tuple[Kind, dict[str, Any], dict[str, Any]], ...], ...] = (
        (("output", expected.outputs, found.outputs),),
        (
            ("input gradient", expected.input_gradients, found.input_gradients),
            ("parameter gradient", expected.parameter_gradients, found.parameter_gradients),
        ),
        (("buffer", expected.buffers, found.buffers),),
    )
    for judged_together in tables:
        sizes = {(kind, name): _size(v) for kind, reference, _ in judged_together for name, v in reference.items()}
        largest = max(sizes.values(), default=0.0)
        for kind, reference, other in judged_together:
            for name in _names(findings, f"{step}, {kind}", reference, other):
                sized = _Sized(reference[name], sizes[kind, name], largest)
                _compare_values(findings, kind, f"{step}, {kind} {name}", sized, other[name])
    for name in _names(findings, f"{step}, generator", expected.generators, found.generators):
        if not torch.equal(expected.generators[name], found.generators[name]):
            findings.add_mismatch(f"{step}, generator {name}", "another state: the random draws were not the same")


class _Sized(NamedTuple):
    """A value of the reference, its largest finite magnitude, and that of all values it is judged with."""

    value: Any
    size: float
    largest: float


def _names(findings: _Findings, place: str, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    for name in sorted(expected.keys() ^ found.keys()):
        if name not in found:
            findings.add_mismatch(f"{place} {name}", "missing")
        else:
            findings.add_mismatch(f"{place} {name}", "not there in the reference")
    return [name for name in expected if name in found]


def _compare_values(findings: _Findings, kind: Kind, where: str, expected: _Sized, found: Any) -> None:
    a, b = expected.value, found
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            findings.add_mismatch(where, f"{_describe(b)} in place of {_describe(a)}")
        elif a != b:
            findings.add_mismatch(where, _OTHER_VALUES)
        return
    if a.shape != b.shape or (findings.dtypes and a.dtype != b.dtype):
        findings.add_mismatch(where, f"{_describe(b)} in place of {_describe(a)}")
        return
    if not same_strides(a, b):
        findings.strides.append(Mismatch(where, f"strides {b.stride()} in place of {a.stride()}"))
    if a.is_floating_point() or a.is_complex():
        vanishes = expected.size <= _vanishing_limit(b.dtype) * expected.largest
        scale = VANISHING_SCALE * expected.largest if vanishes else expected.size
        findings.add_error("vanishing" if vanishes else kind, where, _relative_error(a, b, scale))
    elif not torch.equal(a, b):
        findings.add_mismatch(where, _OTHER_VALUES)


def _relative_error(a: Tensor, b: Tensor, scale: float) -> float:
    a, b = _widen(a), _widen(b)
    distance = a - b
    worst = _reach(distance)
    if not math.isfinite(worst):  # the difference is no number where both are infinite
        worst = _reach(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, distance))
    if worst == 0:
        return 0.0
    return worst / scale if scale > 0 and not math.isnan(worst) else math.inf


def _vanishing_limit(dtype: torch.dtype) -> float:
    """Return the size, relative to the largest, below which rounding of the largest is what a tensor holds.

    Sums of terms of size 1 carry an error of some eps; in a result of size s that is eps / s, more than 1e-9 of it
    below s = 1e-6 in float64.
    """
    return max(math.pow(torch.finfo(dtype).eps, 2 / 3), LEAST_SIZE)


def _size(value: Any) -> float:
    """Return the largest finite magnitude of a tensor of floating-point numbers, 0 of anything else."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    wide = _widen(value)
    reach = _reach(wide)
    return reach if math.isfinite(reach) else _reach(torch.where(wide.isfinite(), wide, 0.0))


def _reach(tensor: Tensor) -> float:
    """Return the largest magnitude, infinite or no number where one element is."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.abs().max())
    least, most = torch.aminmax(tensor)
    return max(-float(least), float(most))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else repr(value)

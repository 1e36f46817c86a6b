"""The exceptions that fxshard raises.

Every message has the node, the user's source line, the value with its unit, the limit and the remedy, as
far as they apply.  ``assert`` is for fxshard's own bugs only.
"""

from __future__ import annotations


class FxShardError(RuntimeError):
    """Something that fxshard cannot do exactly, said before anything runs."""


class CaptureError(FxShardError):
    """The model's graph could not be captured as a functional ATen graph."""


class PlanError(FxShardError):
    """No plan satisfies what was asked: placements, mesh and shapes do not fit together."""


class RankMismatchError(FxShardError):
    """The ranks disagree: about the collectives they will run, or about the generator's state."""

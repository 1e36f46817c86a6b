"""The exceptions that fxshard raises.

Every message has the node, the user's source line, the value with its unit, the limit and the remedy, as
far as they apply.  ``assert`` is for fxshard's own bugs only.
"""

from __future__ import annotations

import os
from typing import TypeVar


class FxShardError(RuntimeError):
    """Something that fxshard cannot do exactly, said before anything runs."""


class CaptureError(FxShardError):
    """The model's graph could not be captured as a functional ATen graph."""


class PlanError(FxShardError):
    """No plan satisfies what was asked: placements, mesh and shapes do not fit together."""


class RankMismatchError(FxShardError):
    """The ranks disagree: about the collectives they will run, or about the generator's state."""


class InternalError(FxShardError):
    """A bug of fxshard; what led to it is its ``__cause__``."""


Failure = TypeVar("Failure", bound=FxShardError)


def again(error: Failure) -> Failure:
    """Return an error that was not raised yet, with the same message and cause."""
    same = type(error)(*error.args)
    same.__cause__ = error.__cause__
    return same


def shortened(error: Failure) -> Failure:
    """Return an error without the hundreds of lines of torch's and fxshard's own frames that led to it.

    A bug keeps them, and so does everything where ``TORCHDYNAMO_VERBOSE=1`` is set, as in torch.

    Args:
        error: What is about to be raised to the user; it is changed.

    Returns:
        The same error.
    """
    if not isinstance(error, InternalError) and os.environ.get("TORCHDYNAMO_VERBOSE") != "1":
        error.__cause__, error.__suppress_context__ = None, True
        error.__traceback__ = None
    return error

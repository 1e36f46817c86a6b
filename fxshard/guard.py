"""What stands before every call of a compiled graph that has collectives: do all ranks run the same, and hold the same?

What they run, and which parameters, is compared at each call, in a few words.  What they hold is compared each
``check_every`` calls, bit for bit: ranks that a fault, or a kernel that adds in no fixed order, has moved apart train
models that look alike.  It is compared, too, where a parameter is a new one, of a layer that was replaced.

What comes in is compared when the parameters are, at those calls, and, as a warning, at some others that become ever
rarer: where a loader gives each rank other batches from some step on, the ranks train something, and nothing fails.
"""

from __future__ import annotations

import logging
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fxshard import agreement, compared
from fxshard._torch import watch_backward
from fxshard.digests import generator_digest, values_digest
from fxshard.errors import RankMismatchError
from fxshard.mesh import news_level
from fxshard.ops.lowering import on_failure
from fxshard.watchdog import watchdog
from fxshard.whereabouts import may_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import fx
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fxshard")
NOT_ONE_BATCH = (
    "warning of fxshard: the ranks were given different inputs, at call %d, and this is looked at only now and then: "
    "results mix the batches.\n%s\ncheck_every=1 makes it an error at the first call that differs"
)
_GLOO = re.compile(r"gloo|Timed out waiting|Connection (closed|reset)|Application timeout", re.IGNORECASE)


class Teller:
    """Tells the other ranks that this one failed while it ran: they may wait for it in a collective, or will.

    Args:
        mesh: The spatial mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._watchdog = mesh, watchdog(mesh)

    def __call__(self, error: BaseException) -> None:
        """Tell of an error.

        Raises:
            RankMismatchError: A collective failed, because another rank did; it says what that rank told.
        """
        if isinstance(error, RankMismatchError):  # an operator told of it
            return
        what = f"{type(error).__name__}: {error}"
        if not _of_communication(error):
            agreement.announce_failure(self._mesh, f"it raised while it ran the model: {what}", error)
            return
        told = agreement.failures_of_others(self._mesh, f"a collective failed: {what}")
        seen = f"\n{self._watchdog.report}" if self._watchdog.report else ""
        msg = f"a collective of the model failed, as another rank ended, raised or was late ({told}): {error}{seen}"
        raise RankMismatchError(msg) from error


class Guard:
    """Compares the ranks of a mesh; to be called with a graph's inputs before it runs.

    Args:
        mesh: The spatial mesh.
        words: What is run.
        state: The names of the inputs that are parameters and buffers, by their numbers.
        given: The names of the other inputs that every rank has whole, by their numbers.
        check_every: Calls from one comparison of what the ranks hold to the next; 0 for none.
        draws: Whether the graph draws random numbers.
        local: The rank's graph: who fails in one of its collectives is asked which it was.
        groups: The names of the process groups that it communicates in, gradients included.
    """

    def __init__(  # noqa: PLR0913
        self,
        mesh: DeviceMesh,
        words: dict[str, str],
        state: Mapping[int, str],
        given: Mapping[int, str],
        *,
        check_every: int,
        draws: bool,
        local: fx.GraphModule,
        groups: Iterable[str],
    ) -> None:
        self.mesh = mesh
        self.words = {agreement.WORK: "a compiled graph to run", **words}
        self.state = state
        self.given = given
        self.check_every = check_every
        self.draws = draws
        self.calls = 0
        self.tell = Teller(mesh)
        self._backward_is_watched = False
        on_failure.update(dict.fromkeys(groups, self.tell))
        self._local = may_run(local)
        self._held: list[weakref.ref[torch.Tensor]] = []
        self._new: list[torch.nn.Parameter] = []
        self._identities = ""

    def check(self, inputs: tuple[Any, ...]) -> None:
        """Compare the ranks.

        Raises:
            RankMismatchError: A rank differs, failed, or did not come.
        """
        call = self.calls + 1  # counted where all ranks come: one that failed before does not come here
        state = [x for number in self.state if isinstance(x := inputs[number], torch.Tensor)]
        self._look_at(state)
        due = bool(self.check_every) and call % self.check_every == 0
        words = {**self.words, "which parameters": self._identities, "check_every": "due" if due else ""}
        if due or self._new:
            words |= self._state_digests(inputs)
        values = self._digests(inputs, self.given) if due or _is_power_of_two(call) else {}
        if due:
            words, values = {**words, **values}, {}
        comparison, differing = agreement.agree_to_run(self.mesh, words, values)
        self.calls = call
        if self._new:
            compared.remember(self.mesh, self._new, comparison)
            self._held = []
        if differing:
            log.log(news_level(self.mesh), NOT_ONE_BATCH, call, differing)

    def watch_backward(self, outputs: Sequence[Any]) -> None:
        """Tell the other ranks of what the backward raises, too.

        Args:
            outputs: What the graph returned.
        """
        if not self._backward_is_watched:
            self._backward_is_watched = watch_backward(outputs, self.tell)

    def _look_at(self, state: Sequence[torch.Tensor]) -> None:
        """See which parameters and buffers these are, if they are not those of the last call."""
        held = [tensor() for tensor in self._held]
        if len(held) != len(state) or any(a is not b for a, b in zip(held, state, strict=True)):
            parameters = [tensor for tensor in state if isinstance(tensor, torch.nn.Parameter)]
            self._new = [] if compared.were_compared(self.mesh, parameters) else parameters
            self._identities = compared.identities(self.mesh, state)
            self._held = [weakref.ref(tensor) for tensor in state]

    def _state_digests(self, inputs: tuple[Any, ...]) -> dict[str, str]:
        """Return a hash of each parameter and buffer, and of the generators' states."""
        found = self._digests(inputs, self.state)
        return {**found, "generator state": generator_digest()} if self.draws else found

    @staticmethod
    def _digests(inputs: tuple[Any, ...], names: Mapping[int, str]) -> dict[str, str]:
        return {name: values_digest([inputs[number]]) for number, name in names.items()}


def _is_power_of_two(number: int) -> bool:
    return number > 1 and number & (number - 1) == 0


def _of_communication(error: BaseException) -> bool:
    """Return whether a collective failed; gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_GLOO.search(str(error))))


def guarded(run: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    """Return ``run`` with the ranks compared before it."""

    def compared(*inputs: Any) -> Any:
        guard.check(inputs)
        try:
            outputs = run(*inputs)
        except BaseException as error:
            guard.tell(error)
            raise
        guard.watch_backward(outputs)
        return outputs

    return compared

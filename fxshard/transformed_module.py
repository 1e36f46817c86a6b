"""A transformed module: of its model's class, with entries of its own in its ``__dict__``.

Python and torch look these names up on the object before its class::

    entry                  who finds it                                                    what they get
    _compiled_call_impl    net(x); Dynamo, when something around net is compiled           the call, over the ranks
    forward                net.forward(x)                                                  the same, without hooks
    __deepcopy__           copy.deepcopy, torch.optim.swa_utils.AveragedModel              a transformed copy
    __getstate__           pickle, torch.save, copy.copy                                   an error
    compile                net.compile()                                                   an error
    _get_name              torch.fx.symbolic_trace(net), which runs the class's forward    an error

Without them each would quietly get the model as it was, on one device.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from fxshard._torch import is_fx_symbolic_tracing
from fxshard.dynamo import is_capturing, traceable_call, traceable_forward
from fxshard.errors import CaptureError, FxShardError, shortened
from fxshard.outer_hooks import within_hooks

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Call: TypeAlias = Callable[..., Any]
    Runner: TypeAlias = Callable[[torch.nn.Module], Callable[[Call], Call]]

Model = TypeVar("Model", bound=torch.nn.Module)
OWN, REPLACED = "_fxshard_entries", "_fxshard_replaced"
"""Where a transformed module keeps its entries, and what the model had under their names."""


def twin(model: Model) -> Model:
    """Return an object of the same class with the same parameters, buffers, submodules and hooks, not transformed.

    Args:
        model: Any module; of a transformed one, the twin is what it was before.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> twin(model).weight is model.weight
        True
    """
    found = object.__new__(type(model))  # not copy.copy: parametrized modules refuse it
    for name, value in _untransformed(model).items():
        bound = isinstance(value, MethodType) and value.__self__ is model
        found.__dict__[name] = MethodType(value.__func__, found) if bound else value
    return found


def make_transformed(net: torch.nn.Module, runner: Runner) -> None:
    """Give a module the entries of a transformed one.

    Args:
        net: Is changed.
        runner: Takes this module, or a copy of it; returns what takes one of its calls in a form that Dynamo traces
            and returns it run over the ranks.
    """
    run = runner(net)
    entries = {
        "_compiled_call_impl": _call_entry(net, run(traceable_call(net))),
        "forward": _forward_entry(net, run(traceable_forward(net))),
        "__deepcopy__": partial(_deepcopy, net, runner),
        "__getstate__": partial(_refuse_state, net),
        "compile": partial(_refuse_compile, net),
        "_get_name": partial(_name_unless_traced, net),
    }
    replaced = {name: net.__dict__[name] for name in entries if name in net.__dict__}
    net.__dict__.update({**entries, OWN: entries, REPLACED: replaced})


def refuse_tracing(net: torch.nn.Module) -> None:
    """Refuse to run for a tracer, which would record what one rank computes.

    Raises:
        CaptureError: ``torch.export``, ``torch.jit.trace`` or a tracer of ``torch.fx`` is running.
    """
    tracers = {
        "torch.export": torch.compiler.is_exporting(),
        "torch.jit.trace": torch.jit.is_tracing(),
        "torch.fx": is_fx_symbolic_tracing(),  # make_fx too
    }
    for tracer, runs in tracers.items():
        if runs:
            msg = (
                f"{tracer} cannot record a transformed {type(net).__name__}, which runs on several ranks; give it the "
                "model as it was before fxshard.transform"
            )
            raise CaptureError(msg)


def _call_entry(net: torch.nn.Module, run: Call) -> Call:
    run = _opaque(net, run)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs) if is_capturing() else within_hooks(self, run, args, kwargs)

    return MethodType(call, net)


def _forward_entry(net: torch.nn.Module, run: Call) -> Call:
    run, replaced = _opaque(net, run), net.__dict__.get("forward")

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            return run(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)

    # not functools.wraps: torch.jit.script would find the model's source
    forward.__doc__, signature = net.forward.__doc__, inspect.signature(net.forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return MethodType(forward, net)


def _opaque(net: torch.nn.Module, run: Call) -> Call:
    """Return what ends the graph of a Dynamo that captures something around the module."""
    reason = (
        f"fxshard captures a transformed {type(net).__name__} whole, on its own: compile what is around it without "
        "fullgraph=True, or transform the module around it in its place"
    )

    def briefly(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except FxShardError as error:
            raise shortened(error)  # noqa: B904  its cause is told, or left out

    opaque: Call = torch.compiler.disable(briefly, reason=reason)
    return opaque


def _untransformed(module: torch.nn.Module) -> dict[str, Any]:
    """Return the ``__dict__`` that a module had before it was transformed, with what was put there since."""
    state = dict(module.__dict__)
    entries, replaced = state.pop(OWN, {}), state.pop(REPLACED, {})
    for name, entry in entries.items():
        if state.get(name) is entry:  # else it was set since, to a wrapper of forward for one
            del state[name]
            state.update({name: replaced[name]} if name in replaced else {})
    return state


def _deepcopy(net: torch.nn.Module, runner: Runner, memo: dict[int, Any]) -> torch.nn.Module:
    found = object.__new__(type(net))
    memo[id(net)] = found  # first: what the module holds may lead back to it
    plain = object.__new__(type(net))
    plain.__dict__.update(_untransformed(net))
    copied = copy.deepcopy(plain, memo)
    found.__class__ = type(copied)  # a GraphModule's copy has a class of its own
    found.__dict__.update(copied.__dict__)
    make_transformed(found, runner)
    return found


def _refuse_state(net: torch.nn.Module) -> NoReturn:
    msg = (
        f"a transformed {type(net).__name__} cannot be pickled or copied by copy.copy: its mesh and compiled graphs "
        "belong to this process; save its state_dict() or the model it was made of, and copy it by copy.deepcopy"
    )
    raise FxShardError(msg)


def _refuse_compile(net: torch.nn.Module, *_args: Any, **_kwargs: Any) -> NoReturn:
    msg = (
        f"a transformed {type(net).__name__} is compiled as it is, and compile() would take the place of that; choose "
        "the compiler by fxshard.transform(..., inner_backend=...)"
    )
    raise FxShardError(msg)


def _name_unless_traced(net: torch.nn.Module) -> str:
    if is_fx_symbolic_tracing():
        refuse_tracing(net)
    name: str = type(net)._get_name(net)
    return name

"""Hooks that run around what is captured: FSDP2's gather the parameters before the forward and let them go after it.

``fully_shard`` hooks them on modules.  What they do is communication over another mesh, which Dynamo does not trace::

    net(x)    hooks before                    captured, over the ranks       hooks after
              of net:     x -> x              that share an image            of net.body: output -> output
              of net.body: nothing            x -> output                    of net:      output -> output

A part's parameters, too, are there from the beginning to the end of the whole forward, and again for the backward.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

OUTER = "torch.distributed.fsdp"
"""The package whose hooks run outside."""


@dataclass(frozen=True)
class Outer:
    """The outer hooks of one module, by their keys.

    Args:
        module: Has them.
        before: Of its forward, called with ``(module, args, kwargs)``.
        after: Called with ``(module, args, output)``.
    """

    module: torch.nn.Module
    before: dict[int, Callable[..., Any]]
    after: dict[int, Callable[..., Any]]


def within_hooks(net: torch.nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``run(*args, **kwargs)`` between the outer hooks of a module and its parts, which it does not see.

    Args:
        net: A transformed module.
        run: What is captured when it is called; it runs the other hooks.
        args: Of the call.
        kwargs: Of the call.
    """
    if OUTER not in sys.modules:
        return run(*args, **kwargs)
    hooked = dict.fromkeys(m for m in modules_of(net) if m._forward_pre_hooks or m._forward_hooks)
    found = [Outer(m, _outer(m._forward_pre_hooks), _outer(m._forward_hooks)) for m in hooked]
    found = [outer for outer in found if outer.before or outer.after]
    for outer in found:
        for hook in outer.before.values():
            if outer.module is net:
                args, kwargs = hook(net, args, kwargs)
            else:
                hook(outer.module, (), {})
    with ExitStack() as stack:
        for outer in found:
            stack.enter_context(_without(outer.module._forward_pre_hooks, outer.before))
            stack.enter_context(_without(outer.module._forward_hooks, outer.after))
        output = run(*args, **kwargs)
    for outer in reversed(found):
        for hook in outer.after.values():
            output = hook(outer.module, args, output)
    return output


def modules_of(net: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and its parts in the order of ``net.modules()``, each as often as it is part of something.

    Args:
        net: Any module; this is asked on every call, of which ``net.modules()`` would take a millisecond.
    """
    found, left = [], [net]
    while left:
        module = left.pop()
        found.append(module)
        left += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def _outer(hooks: dict[int, Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    return {key: hook for key, hook in hooks.items() if _package(hook).startswith(OUTER)} if hooks else {}


def _package(hook: Callable[..., Any]) -> str:
    return type(getattr(hook, "__self__", None)).__module__


@contextmanager
def _without(hooks: dict[int, Callable[..., Any]], outer: dict[int, Callable[..., Any]]) -> Iterator[None]:
    """Take hooks out, and put them back where they were."""
    before = dict(hooks)
    for key in outer:
        del hooks[key]
    try:
        yield
    finally:
        now = {**hooks, **outer}
        hooks.clear()
        hooks.update({key: now[key] for key in before if key in now})
        hooks.update(now)  # those that were registered meanwhile come last

"""Orders the passes and names the one that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxshard.errors import FxShardError, InternalError
from fxshard.passes.apply_autocast import apply_autocast
from fxshard.passes.bucket_gradients import bucket_gradients
from fxshard.passes.capture import capture
from fxshard.passes.count_random import count_random
from fxshard.passes.expand_random import expand_random
from fxshard.passes.hoist_sums import hoist_sums
from fxshard.passes.lower import without_autocast
from fxshard.passes.plan import plan
from fxshard.passes.push_splits import push_splits
from fxshard.passes.replace_random import replace_random
from fxshard.passes.rewrite import rewrite
from fxshard.passes.use_kernels import use_kernels
from fxshard.passes.wrap_checkpoints import wrap_checkpoints
from fxshard.passes.wrap_gradients import wrap_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from fxshard.passes.bucket_gradients import Groups
    from fxshard.passes.config import Config


def run_pass(function: Callable[..., fx.GraphModule], gm: fx.GraphModule, **options: Any) -> fx.GraphModule:
    """Run one pass, lint and recompile its result.

    Raises:
        FxShardError: As the pass raised it.
        InternalError: It raised something else; with the name of the pass.
    """
    try:
        result = function(gm, **options)
        result.graph.lint()
        result.recompile()
    except FxShardError:
        raise
    except Exception as error:
        msg = f"pass {function.__name__!r} failed, a bug of fxshard: {type(error).__name__}: {error}"
        raise InternalError(msg) from error
    return result


def planned(gm: fx.GraphModule, example_inputs: Sequence[Any], *, config: Config) -> fx.GraphModule:
    """Return the captured graph with a layout on every node."""
    return laid_out(captured(gm, example_inputs, config=config), config=config)


def laid_out(functional: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Return a functional global graph, changed in place, with a layout on every node."""
    return run_pass(push_splits, run_pass(plan, functional, config=config), config=config)


def captured(gm: fx.GraphModule, example_inputs: Sequence[Any], *, config: Config) -> fx.GraphModule:
    """Return the functional global graph that is planned."""
    explicit = run_pass(apply_autocast, gm, example_inputs=example_inputs)
    with without_autocast():
        functional = capture(explicit, example_inputs)
    functional = run_pass(expand_random, functional)
    if config.rng == "counter":
        functional = run_pass(count_random, functional)
    return run_pass(replace_random, functional)


def localized(planned_graph: fx.GraphModule, *, config: Config) -> fx.GraphModule:
    """Return the local graph of ``config.rank``."""
    return run_pass(hoist_sums, run_pass(rewrite, planned_graph, config=config))


def executable(local: fx.GraphModule, *, config: Config, groups: Groups = tuple) -> fx.GraphModule:
    """Return a local graph with fxshard's kernels, and with what autograd has to treat as one piece in submodules.

    Args:
        local: A local graph; it is changed.
        config: Names the inner backend and says how gradients are summed.
        groups: As :func:`fxshard.passes.bucket_gradients.bucket_gradients` takes it.
    """
    local = run_pass(use_kernels, local, config=config)
    local = run_pass(wrap_gradients, local)
    local = run_pass(bucket_gradients, local, config=config, groups=groups)
    return run_pass(wrap_checkpoints, local, config=config)

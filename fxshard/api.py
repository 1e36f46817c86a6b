"""``fxshard.transform``: a model whose forward runs spatially parallel."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from fxshard._torch import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    Unsupported,
    UserError,
    unsynchronised_batch_norms,
    whole_graph_in_ddp,
)
from fxshard.agreement import announce_failure
from fxshard.backend import fxshard as backend
from fxshard.errors import CaptureError, FxShardError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Model = TypeVar("Model", bound=torch.nn.Module)


def transform(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    inner_backend: str = "inductor",
    rng: str = "match",
) -> Model:
    """Return ``model`` with a forward that splits the image over the ranks of ``mesh``.

    The result behaves on every rank as ``model`` does on one device with the whole input: the same outputs,
    gradients, buffers and random draws.  It is a shallow copy: class, parameters, buffers, submodules and
    ``state_dict()`` keys are those of ``model``, which is not changed.

    Args:
        model: Any module that ``torch.compile(fullgraph=True)`` can capture.
        mesh: The ranks that share an image, 1-D to 3-D; None for all ranks of the default process group
            (started from torchrun's environment when it is not up).
        placements: One ``torch.distributed.tensor`` placement for each mesh axis, for the image-like inputs:
            ``[Shard(3)]`` splits the width of (N, C, H, W).  None splits the largest spatial dimensions.
        inner_backend: The Dynamo backend that compiles the rewritten graph: "inductor", "aot_eager", "eager", ...
        rng: "match": random draws have the bits that the untouched model draws in eager mode.

    Returns:
        A module of the same class.  Every rank passes the whole batch and gets whole outputs.

    Raises:
        FxShardError: (when called) the model cannot be captured whole, the ranks disagree, or the request does
            not fit the inputs.

    Example:
        >>> net = transform(torch.nn.Conv2d(3, 8, 7, padding=3), inner_backend="eager")
        >>> net(torch.randn(1, 3, 16, 64)).shape
        torch.Size([1, 8, 16, 64])
    """
    options = {"mesh": mesh, "placements": placements, "inner_backend": inner_backend, "rng": rng}
    net = object.__new__(type(model))  # not copy.copy: parametrized modules refuse it
    net.__dict__.update(model.__dict__)
    net.__dict__["_compiled_call_impl"] = _compiled_call(net, options)
    return net


def _compiled_call(net: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    compiled = torch.compile(
        net._call_impl, backend=functools.partial(backend, options=options), fullgraph=True, dynamic=False
    )

    @functools.wraps(net.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with whole_graph_in_ddp(), _one_device_batch_norms(net, options["mesh"]):
                return compiled(*args, **kwargs)
        except FxShardError:
            raise
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, FxShardError):
                raise error.inner_exception from error
            announce_failure(options["mesh"], str(error))
            raise
        except (Unsupported, UserError, InternalTorchDynamoError) as error:
            msg = f"{type(net).__name__} cannot be captured whole: {error}"
            announce_failure(options["mesh"], msg)
            raise CaptureError(msg) from error
        except Exception as error:
            announce_failure(options["mesh"], f"{type(error).__name__}: {error}")
            raise

    return call


def _one_device_batch_norms(net: torch.nn.Module, mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Return a context in which the net's ``SyncBatchNorm`` modules leave the synchronising to the plan.

    Raises:
        PlanError: One shares its statistics with ranks that are not in the mesh.
    """
    norms = [(name, m) for name, m in net.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
    if not norms or not dist.is_initialized():
        return nullcontext()
    ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
    for name, norm in norms:
        group = dist.get_process_group_ranks(norm.process_group or dist.group.WORLD)
        outside = sorted(set(group) - set(ranks)) if norm.training else []
        if outside:
            msg = (
                f"{name or type(norm).__name__} shares batch statistics with ranks {outside}, which are not in the "
                f"mesh of ranks {sorted(ranks)}; use BatchNorm, or a process_group of the mesh's ranks"
            )
            raise PlanError(msg)
    return unsynchronised_batch_norms()

"""``fxshard.transform``: a model whose forward runs spatially parallel."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fxshard._torch import unsynchronised_batch_norms
from fxshard.agreement import announce_failure
from fxshard.backend import compile_graph
from fxshard.batch_norms import batch_norms
from fxshard.dynamo import capturing, counted, not_captured
from fxshard.errors import PlanError
from fxshard.local_io import Entrance
from fxshard.mesh import default_mesh
from fxshard.options import check_choices, placements_of, split_dims_of
from fxshard.transformed_module import make_transformed, refuse_tracing, twin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from fxshard.devices import Device
    from fxshard.options import Placements, Rng

Model = TypeVar("Model", bound=torch.nn.Module)


def transform(  # noqa: PLR0913  options, by keyword
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements = None,
    inner_backend: str = "inductor",
    rng: Rng = "match",
    inputs: Literal["global", "local"] = "global",
    outputs: Literal["global", "local"] = "global",
    bucket_cap_mb: float = 25.0,
    reduce_dtype: torch.dtype | None = None,
    check_every: int = 0,
    device: str | Device | None = None,
    kernels: bool = False,
    mode: str = "default",
    memory_budget: float = 1.0,
) -> Model:
    """Return ``model`` with a forward that splits the image over the ranks of ``mesh``.

    The result behaves on every rank as ``model`` does on one device with the whole input: the same outputs,
    gradients, buffers and random draws.  It is a shallow copy: class, parameters, buffers, submodules and
    ``state_dict()`` keys are those of ``model``, which is not changed.

    **What goes in and out.**  Every rank calls the result, always, in training and in evaluation, with the same whole
    batch, and receives the whole output.  Parameters are whole on every rank, and after ``loss.backward()`` so are
    their gradients, summed over the ranks of ``mesh``: an optimizer needs nothing else.  With ``inputs="local"`` a
    rank passes its part, with ``outputs="local"`` it keeps its part.

    **When it compiles.**  Nothing happens before the first call.  That one captures the model, plans, and compiles
    this rank's graph with ``inner_backend``; so does the first call with another input shape or dtype, with
    gradients on or off, and in the other of train and eval mode.  ``fxshard.plan`` shows the plan without ranks.

    **What is compared.**  Ranks that do not run the same would wait for one another for ever, so they compare what
    they are about to do.  When a graph is compiled: options, input shapes, captured graph, sequence of collectives,
    memory formats, torch version and, where the graph draws, the generator's state; at the first compilation also the
    values of parameters, buffers and inputs.  At each call: which graph it is, by a few small requests to the process
    group's store.  Values are compared again where ``check_every`` asks for it, and of parameters that replaced others;
    inputs also at the second, fourth, eighth ... call of a graph, where a difference is a warning in the log.  After an
    error that every rank caught, the next call compiles again what could not be compiled.

    **What it costs.**  A message to each neighbour at each layer with a halo, forward and backward; a few
    numbers of each batch norm; an all-reduce of the parameters' gradients, in buckets; and whatever the plan gathers.
    With one rank the model runs as ``torch.compile`` with ``inner_backend`` runs it, with eager mode's draws.

    **What to save.**  ``state_dict()`` of the result, or of ``model``, with which it shares its parameters, and of the
    optimizer, on one rank: they are the same on all.  Where the model draws (dropout), also the generator's state,
    ``torch.get_rng_state()`` and on GPUs ``torch.cuda.get_rng_state()``.  With all of it loaded on every rank, a
    training goes on as if it had not ended, on as many ranks as before, on fewer, or on one device without fxshard.

    **When sizes change.**  Each size of the inputs is compiled once, when it comes first, and kept: up to 64 for one
    transformed model, modes and sets of frozen parameters counted.  One more is an error.  The log says each with its
    number, from the fifth on as a warning: pad to a few sizes, or train on crops of one.

    **What can go wrong.**  What cannot be done is an error that says what to change.  One mistake nobody can see: with
    ``outputs="local"`` each rank's gradients are a term of a sum over the ranks, so its loss has to be its term of the
    whole loss.  The mean over its own part is none, and gives wrong gradients without an error::

        labels = DTensor.from_local(my_labels, mesh, [Shard(2)])                 # parts of one size
        labels = distribute_tensor(all_labels, mesh, [Shard(2)], src_data_rank=None)            # of any
        F.cross_entropy(out, labels)                                             # right: DTensor adds up
        F.cross_entropy(out.full_tensor(), all_labels)                           # right, gathers the map
        F.cross_entropy(out.to_local(), my_labels, reduction="sum") / count      # right: of the whole batch
        F.cross_entropy(out.to_local(), my_labels)                               # wrong

    Copies by ``copy.deepcopy`` are transformed too, as ``torch.optim.swa_utils.AveragedModel`` makes them.  A
    ``torch.compile`` of what is around the result ends its graph there; it cannot be pickled, exported or traced.

    Args:
        model: Any module that ``torch.compile(fullgraph=True)`` can capture.
        mesh: The ranks that share an image, 1-D to 3-D; None for all ranks of the default process group
            (started from torchrun's environment when it is not up).
        placements: One ``torch.distributed.tensor`` placement for each mesh axis, for the image-like inputs:
            ``[Shard(3)]`` splits the width of (N, C, H, W); dimensions are counted from the front, as inputs may differ
            in how many they have.  None splits the largest spatial dimensions.  A dict names modules that run whole, by
            patterns, with these under ``""``: ``{"": [Shard(3)], "head.*": Replicate()}``.
        inner_backend: The Dynamo backend that compiles the rewritten graph: "inductor", "aot_eager", "eager", ...
        rng: "match": random draws have the bits that the untouched model draws in eager mode; each is drawn whole and
            cut.  "counter": each rank makes the numbers of its part, hashed from a seed of the default generator and
            the place in the whole; they are the same for any number of ranks, and not the untouched model's.
        inputs: "global": every rank passes the whole batch.  "local": the image-like tensors (floating or bytes, with
            the most dimensions) are this rank's part, cut along ``placements``, which are needed then; the gradient of
            a part is that part of the whole's gradient.  A ``DTensor`` on ``mesh`` is taken as what it is either way.
            Parts may have other shapes on every call, so every call tells them to the other ranks through the process
            group's store; a ``DTensor`` knows the whole's shape and avoids this.
        outputs: "global": whole tensors on every rank.  "local": outputs that the plan leaves split are ``DTensor``
            on ``mesh``, cut as ``torch.chunk`` cuts; the others are whole.  For a loss of such an output see above.
        bucket_cap_mb: When an all-reduce of gradients is full, in MiB, as in ``DistributedDataParallel``; 0 gives each
            parameter its own.
        reduce_dtype: What gradients are summed over the ranks in; None for each parameter's own type.
        check_every: After how many calls of a compiled graph the ranks compare, bit for bit, all parameters, buffers
            and generator states that it uses, and the inputs; 0 for never.  Each time reads all of them once.
        device: What the ranks are, such as ``"h200"``, or a :class:`fxshard.devices.Device`: what is cheaper there on
            every rank whole, by its figures, is left whole, such as small late maps.  None splits whatever can be.
        kernels: Whether fxshard's own kernels take the place of the libraries' where they were measured to need less of
            the GPU: depthwise convolutions of 7 x 7 in bfloat16, on an H100 or H200.  They sum in float32, in another
            order, and take the host longer to launch.
        mode: As ``torch.compile``'s, for Inductor: "default", or "reduce-overhead", which records what the GPU does
            once in CUDA graphs and replays it; what a call returns is overwritten by a later one then.
        memory_budget: How much of what would be kept for the backward may be, above 0 and at most 1: the rest is
            computed again, as in ``torch._functorch.config.activation_memory_budget``.  Nothing is sent or drawn again.

    Returns:
        A module of the same class.

    Raises:
        PlanError: An option has an unknown word or type, ``placements`` do not fit ``mesh``, or this rank is not in it;
            (when called) ``placements`` or parts do not fit the inputs.
        CaptureError: (when called) The model cannot be captured whole; with the line.
        RankMismatchError: (when called) The ranks disagree, or one of them failed, ended or did not come.
        FxShardError: All of these; and (when the result is pickled or compiled) that would lose the ranks.

    Example:
        On one rank; under ``torchrun`` the same lines run on all of them:

        >>> net = transform(torch.nn.Conv2d(3, 8, 7, padding=3), inner_backend="eager")
        >>> net(torch.randn(1, 3, 16, 64)).shape
        torch.Size([1, 8, 16, 64])

        A training on ranks that split the width::

            mesh = init_device_mesh("cuda", (8,))
            torch.manual_seed(0)                                  # the same parameters on every rank
            net = timm.create_model("convnext_base").cuda()
            optimizer = torch.optim.AdamW(net.parameters())
            net = fxshard.transform(net, mesh=mesh, placements=[Shard(3)])
            for images, labels in loader:                         # the same batches on every rank
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    if not isinstance(model, torch.nn.Module):
        msg = f"transform takes a torch.nn.Module and was given a {type(model).__name__}; put a function in a module"
        raise PlanError(msg)
    options = {
        "mesh": mesh,
        "placements": placements,
        "inner_backend": inner_backend,
        "rng": rng,
        "inputs": inputs,
        "outputs": outputs,
        "bucket_cap_mb": bucket_cap_mb,
        "reduce_dtype": reduce_dtype,
        "check_every": check_every,
        "device": device,
        "kernels": kernels,
        "mode": mode,
        "memory_budget": memory_budget,
    }
    net = twin(model)
    make_transformed(net, functools.partial(_runner, options))
    return net


def _runner(options: dict[str, Any], net: torch.nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what takes a call of ``net`` that Dynamo can trace, and returns it captured and run over the ranks."""
    entrance = _entrance(options)
    options = {name: value for name, value in options.items() if name != "inputs"}
    announce = functools.partial(announce_failure, options["mesh"])

    def compile_one(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return counted(compile_graph(gm, example_inputs, options, model=type(net).__name__))

    def runner(traceable: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(traceable, backend=compile_one, fullgraph=True, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            refuse_tracing(net)
            mesh = entrance.mesh()  # first: the start of the default group clears what Dynamo knows of torch
            with capturing(net, announce) as call:
                with _one_device_batch_norms(net, options["mesh"]), entrance.open(args, kwargs) as (given, named):
                    outputs = compiled(*given, **named)
                if not call.graphs and _is_new(outputs, (args, kwargs)) and mesh.size() > 1:
                    raise not_captured(net)
                return outputs

        return run

    return runner


def _is_new(outputs: Any, inputs: Any) -> bool:
    """Return whether some output is no input: something was computed."""
    given = {id(leaf) for leaf in tree_leaves(inputs)}
    return any(isinstance(leaf, torch.Tensor) and id(leaf) not in given for leaf in tree_leaves(outputs))


def _entrance(options: dict[str, Any]) -> Entrance:
    """Return what takes the inputs apart.

    Raises:
        PlanError: The options do not fit together.
    """
    check_choices(options)
    mesh, placements, local = options["mesh"], options["placements"], options["inputs"] == "local"
    if local and placements is None:
        msg = (
            "inputs='local' says that each rank passes its part: of which dimension? Give placements=[Shard(dim), ...]"
        )
        raise PlanError(msg)
    images, _ = placements_of(placements)
    axes = mesh.ndim if mesh is not None else len(images) if isinstance(images, (list, tuple)) else 1
    asked = None if images is None else split_dims_of(images, axes)
    dims = asked if local else None
    return Entrance(functools.cache(lambda: default_mesh() if mesh is None else mesh), dims, local)


def _one_device_batch_norms(net: torch.nn.Module, mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Return a context in which the net's ``SyncBatchNorm`` modules leave the synchronising to the plan.

    Raises:
        PlanError: One shares its statistics with ranks that are not in the mesh.
    """
    norms = [norm for norm in batch_norms(net) if isinstance(norm, torch.nn.SyncBatchNorm)]
    if not norms or not dist.is_initialized():
        return nullcontext()
    ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
    for norm in norms:
        group = dist.get_process_group_ranks(norm.process_group or dist.group.WORLD)
        outside = sorted(set(group) - set(ranks)) if norm.training else []
        if outside:
            name = next(name for name, module in net.named_modules() if module is norm)
            msg = (
                f"{name or type(norm).__name__} shares batch statistics with ranks {outside}, which are not in the "
                f"mesh of ranks {sorted(ranks)}; use BatchNorm, or a process_group of the mesh's ranks"
            )
            raise PlanError(msg)
    return unsynchronised_batch_norms()

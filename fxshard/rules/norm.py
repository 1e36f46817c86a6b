"""Normalisation: over split dimensions the statistics are those of the whole image.

    y = (x - mean) / sqrt(var + eps) * weight + bias

Where no normalised dimension is split the fused operator runs locally.  Else the call is expanded into
``var_mean`` (whose rule merges the ranks' moments) and pointwise arithmetic, in float32 or wider, so the
gradient through the statistics is derived by autograd like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxshard.layout import Placement, Replicate, Shard
from fxshard.rules.reduce import wide
from fxshard.rules.rule import Choice, Expand, Row, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxshard.rules.call import OpCall

aten = torch.ops.aten
NAMES = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
"""The arguments that the batch norms' schemas share."""


def _local(call: OpCall, at: tuple[Placement, ...], outputs: int = 1) -> Row:
    """Return the row of a call whose statistics are not split: the first output follows the image."""
    image, rest = at[0], (Replicate(),) * (len(at) - 1)
    assert isinstance(image, Shard)
    return Row((image, *rest), (image, *(Replicate(),) * (outputs - 1)))


def _affine(x: Tensor, var: Tensor, mean: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the normalised x; ``weight`` and ``bias`` broadcast against it."""
    scale = torch.rsqrt(var + eps)
    y = (x - mean) * (scale if weight is None else scale * weight)
    return y if bias is None else y + bias


def _per_channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    if parameter is None:
        return None
    return wide(parameter).reshape(1, -1, *(1,) * (x.ndim - 2))


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (y, batch mean, batch inverse deviation, running mean, running variance)."""
    values = wide(x)
    dims = [0, *range(2, x.ndim)]
    var, mean = torch.var_mean(values, dims, correction=0, keepdim=True)
    y = _affine(values, var, mean, eps, _per_channel(weight, x), _per_channel(bias, x)).to(x.dtype)
    count = x.numel() // x.shape[1]
    flat_mean, flat_var = mean.detach().reshape(-1), var.detach().reshape(-1)
    unbiased = flat_var * (count / max(count - 1, 1))
    updated = tuple(
        None if old is None else wide(old) * (1 - momentum) + momentum * new
        for old, new in zip(running, (flat_mean, unbiased), strict=True)
    )
    return y, flat_mean, torch.rsqrt(flat_var + eps), updated[0], updated[1]


def _running_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what a batch norm in eval mode returns: y, two empty tensors and the statistics as they are."""
    centre, spread, scale, shift = (_per_channel(p, x) for p in (mean, var, weight, bias))
    assert centre is not None
    assert spread is not None
    y = _affine(wide(x), spread, centre, eps, scale, shift).to(x.dtype)
    return y, x.new_empty(0), x.new_empty(0), mean, var


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.native_batch_norm.default,
    aten.batch_norm.default,
)
def place_batch_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Take statistics over all ranks in training; normalise locally with running ones."""
    image = at[0]
    training = call.arguments.get("training", "update" in str(call.op) and "no_update" not in str(call.op))
    if isinstance(image, Shard) and image.dim != 1 and not training:
        return _local(call, at, len(call.output_values))
    outputs, names = len(call.output_values), list(call.arguments)

    def program(*args: Any, **kwargs: Any) -> Any:
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        x, weight, bias, mean, var, momentum, eps = (bound.get(n) for n in NAMES)
        if training:
            results = _batch_norm(x, weight, bias, (mean, var), momentum, eps)  # type: ignore[arg-type]
        else:
            results = _running_norm(x, weight, bias, mean, var, eps)  # type: ignore[arg-type]
        return _as_declared(_outputs(results, outputs), call.output_values)

    return Expand(program)


def _as_declared(results: Any, values: Sequence[Tensor | None]) -> Any:
    """Return the results in the types that the operator says: of half precision, statistics are single on some."""
    if isinstance(results, torch.Tensor):
        return results
    return tuple(r if r is None or v is None else r.to(v.dtype) for r, v in zip(results, values, strict=True))


def _outputs(results: tuple[Tensor | None, ...], count: int) -> Any:
    """Return the first results of a batch norm, as many as the overload has (reserves are empty)."""
    if count == 1:
        return results[0]
    assert results[0] is not None
    padded = (*results, results[0].new_empty(0, dtype=torch.uint8))
    if count == 4:
        return (*results[:3], padded[-1])
    return padded[:count]


@rule(aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default)
def place_layer_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Stay local while no normalised dimension is split."""
    image = at[0]
    first = len(call.shape(0)) - len(call["normalized_shape"])
    if isinstance(image, Shard) and image.dim < first:
        outputs = (image, *(image,) * (len(call.output_values) - 1))
        return Row((image, *(Replicate(),) * (len(at) - 1)), outputs)
    return Expand(_rms_norm if call.op is aten.rms_norm.default else _layer_norm(len(call.output_values)))


def _layer_norm(outputs: int) -> Any:
    def program(
        x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any
    ) -> Any:
        values = wide(x)
        var, mean = torch.var_mean(values, list(range(x.ndim - len(shape), x.ndim)), correction=0, keepdim=True)
        y = _affine(values, var, mean, eps, weight, bias).to(x.dtype)
        return y if outputs == 1 else (y, mean, torch.rsqrt(var + eps))

    return program


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    values = wide(x)
    square = (values * values).mean(list(range(x.ndim - len(shape), x.ndim)), keepdim=True)
    y = values * torch.rsqrt(square + (torch.finfo(x.dtype).eps if eps is None else eps))
    return (y if weight is None else y * weight).to(x.dtype)


@rule(aten.group_norm.default)
def place_group_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Stay local for a split batch; else take each group's statistics over all ranks."""
    image = at[0]
    if isinstance(image, Shard) and image.dim == 0:
        return _local(call, at)
    return Expand(_group_norm)


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    values = wide(x)
    grouped = values.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    var, mean = torch.var_mean(grouped, list(range(2, grouped.ndim)), correction=0, keepdim=True)
    per_group = (None if p is None else wide(p).reshape(1, groups, -1, *(1,) * (x.ndim - 2)) for p in (weight, bias))
    return _affine(grouped, var, mean, eps, *per_group).reshape(x.shape).to(x.dtype)


@rule(aten.instance_norm.default)
def place_instance_norm(call: OpCall, at: tuple[Placement, ...]) -> Choice:
    """Stay local for a split batch without running statistics; else take statistics over all ranks."""
    image = at[0]
    if isinstance(image, Shard) and image.dim == 0 and call["running_mean"] is None:
        return _local(call, at)
    return Expand(_instance_norm)


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    values = wide(x)
    if use_input_stats:
        spread, centre = torch.var_mean(values, list(range(2, x.ndim)), correction=0, keepdim=True)
    else:
        assert mean is not None
        assert var is not None
        spread, centre = (p.reshape(1, -1, *(1,) * (x.ndim - 2)) for p in (var, mean))
    return _affine(values, spread, centre, eps, _per_channel(weight, x), _per_channel(bias, x)).to(x.dtype)

"""Calls that capture does not see through, spelled out.

Capture sees what an operator's schema says it writes; ``aten::instance_norm`` says nothing and updates the running
statistics inside.  ``aten::dropout`` returns its input where it drops nothing, so capture refuses to write to its
result in either case.  ``x.data`` is no operator at all, and ``x.data *= y`` assigns what it has written already::

    F.instance_norm(x, mean, var, ...)      ->      mean.lerp_(the instances' mean); var.lerp_(their unbiased variance)
                                                    F.instance_norm(x, None, None, ...)
    F.dropout(x, p)                         ->      F.dropout(x, p).clone(), or x itself
    F.embedding(i, table, max_norm=...)     ->      table: shorten the rows in no_grad; F.embedding(i, table)
    F.group_norm(x), x.roll(...), ...       ->      the same in the memory order of the CPU's kernel, not the fake one's
    x[i] = y, of complex numbers            ->      view_as_real(x)[i] = view_as_real(y)
    x.data                                  ->      x.detach()
    x.data *= y                             ->      x.detach().mul_(y)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fxshard._torch import get_data, set_data
from fxshard.ops.memory import CHANNELS_LAST

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``torch.nn.functional.instance_norm``'s result with its updates written out."""
    if not use_input_stats or running_mean is None or running_var is None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    with torch.no_grad():
        var, mean = torch.var_mean(input, list(range(2, input.ndim)), correction=1)
        for running, new in ((running_mean, mean), (running_var, var)):
            running.copy_((running * (1 - momentum) + momentum * new.mean(0)).to(running.dtype))
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def _aten_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Return ``torch.instance_norm``'s result with its updates written out."""
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return ``torch.nn.functional.dropout``'s result, which may be written to."""
    if not training or p == 0:
        return input
    return F.dropout(input, p, True, inplace) if inplace else F.dropout(input, p).clone()


def _aten_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Return ``torch.dropout``'s result, which may be written to."""
    return _dropout(input, p, train)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, *args: Any, **kw: Any
) -> Tensor:
    """Return ``torch.nn.functional.embedding``'s result of the renormalised table."""
    return F.embedding(input, _renormed(weight, input, max_norm, *args, **kw), padding_idx, None, *args, **kw)


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, *args: Any, **kw: Any
) -> Tensor:
    """Return ``torch.nn.functional.embedding_bag``'s result of the renormalised table."""
    return F.embedding_bag(input, _renormed(weight, input, max_norm, *args, **kw), offsets, None, *args, **kw)


def _renormed(
    weight: Tensor, input: Tensor, max_norm: float | None, norm_type: float = 2.0, *_: Any, **__: Any
) -> Tensor:
    """Shorten the rows of ``weight`` that ``input`` names, if there is a limit; autograd does not see it."""
    if max_norm is None:
        return weight
    old = weight.clone()
    with torch.no_grad():
        torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    renewed: Tensor = torch.ops.fxshard.renew(old, weight)
    return renewed


def _ordered(function: Callable[..., Tensor], *, keeps: bool = True) -> Callable[..., Tensor]:
    """Return ``function`` with its result in the memory order of the CPU's kernel, of which the fake one knows nothing.

    Draws fill memory in its order, so a dropout behind would draw other numbers.

    Args:
        function: Its first argument is a tensor.
        keeps: Whether the kernel keeps channels last, or works on a contiguous copy.
    """

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.ndim not in CHANNELS_LAST or input.device.type != "cpu" or input.is_contiguous():
            return function(input, *args, **kwargs)
        if not keeps:
            return function(input.contiguous(), *args, **kwargs)
        made, (last, _) = function(input, *args, **kwargs), CHANNELS_LAST[input.ndim]
        return made.contiguous(memory_format=last) if input.is_contiguous(memory_format=last) else made

    return run


def _setitem(x: Any, index: Any, value: Any) -> None:
    """Write a part of a tensor; of a complex one as real numbers, for its scatter has no derivative."""
    if not (isinstance(x, torch.Tensor) and x.is_complex()):
        operator.setitem(x, index, value)
        return
    indices = index if isinstance(index, tuple) else (index,)
    open_end = any(i is Ellipsis for i in indices)
    value = torch.as_tensor(value, device=x.device).to(x.dtype)
    torch.view_as_real(x)[(*indices, slice(None)) if open_end else indices] = torch.view_as_real(value)


def _set_data(x: Tensor, source: Any, *rest: Any) -> Tensor:
    """Return ``x`` with the memory of ``source``, which it may have already."""
    if isinstance(source, torch.Tensor) and not rest and _memory(x) == _memory(source):
        return x
    made: Tensor = set_data(x, source, *rest)
    return made


def _memory(x: Tensor) -> tuple[object, ...]:
    return x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset(), x.dtype


SPELLED_OUT: dict[Any, Callable[..., Any]] = {
    F.instance_norm: _instance_norm,
    torch.instance_norm: _aten_instance_norm,
    F.dropout: _dropout,
    torch.dropout: _aten_dropout,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    operator.setitem: _setitem,
    get_data: torch.detach,
    set_data: _set_data,
}
"""For a call of a Dynamo graph that capture does not see through, one that it does."""
SPELLED_OUT |= {f: _ordered(f) for f in (F.group_norm, torch.group_norm, torch.roll, torch.channel_shuffle)}
SPELLED_OUT |= {f: _ordered(f, keeps=False) for f in (F.rrelu, torch.rrelu)}
METHODS: dict[str, Callable[..., Any]] = {"roll": _ordered(torch.roll)}
"""The same for a call of a tensor's method."""

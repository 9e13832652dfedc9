"""Layouts of the last lists of tensors, which guards recognize in one call instead of several queries a tensor."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # does not import Dynamo

from impl.kernels._lists import are_on
from impl.kernels._native.memory import KnownLayoutList, ListLayout, formed

_MOST_LISTS = 32
_DEVICE_TYPES = ("cpu", "cuda")


class _KeptLayout(NamedTuple):
    guards: TensorGuards  # hold no tensor
    layout: ListLayout


_kept: dict[tuple[int, torch.dtype], _KeptLayout] = {}
_lock = Lock()


def tensor_guards(
    tensors: list[Tensor], with_shapes: bool = False, with_strides: bool = False
) -> TensorGuards:
    """Guards on type, device, dtype and layout of these tensors, and on how they take part in autograd.

    Strides are those of strided tensors; the others have none. Guards refuse a list that holds a tensor twice.
    """
    free: list[Any] = [[None] * tensor.dim() for tensor in tensors]
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors] if with_shapes else free
    strides: list[Any] = [
        list(tensor.stride()) if with_strides and tensor.layout is torch.strided else none
        for tensor, none in zip(tensors, free, strict=True)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


def recognize_layout(tensors: list[Tensor]) -> KnownLayoutList | None:
    """Return the tensors with a kept layout. None if no list of their layout was passed to `keep_layout` lately."""
    if not tensors or not _can_guard():
        return None
    kept = _kept.get((len(tensors), tensors[0].dtype))
    if kept is None or not kept.guards.check(*tensors):
        return None
    return KnownLayoutList(tensors, kept.layout)


def keep_layout(tensors: list[Tensor]) -> KnownLayoutList | None:
    """Return the tensors with their layout, and keep the layout for lists to come.

    Args:
        tensors: plain strided ones, none of them made in inference mode; not empty.

    Returns:
        None if they are empty, on several devices or on another than the CPU and CUDA, or as `formed` says.
    """
    device = tensors[0].device
    if device.type not in _DEVICE_TYPES or not are_on(device, tensors):
        return None
    known = formed(tensors)
    if known is None or not _can_guard():
        return known
    kept = _KeptLayout(tensor_guards(tensors, with_shapes=True, with_strides=True), known.form)
    with _lock:
        _kept.pop(key := (len(tensors), tensors[0].dtype), None)
        _kept[key] = kept
        if len(_kept) > _MOST_LISTS:
            del _kept[next(iter(_kept))]
    return known


def _can_guard() -> bool:
    # In inference mode guards do not tell its tensors from others. Dynamo cannot trace guards.
    return not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()

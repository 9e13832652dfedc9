"""Cached layouts of the last lists of tensors, which guards recognise in one call."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # does not import Dynamo

from impl.kernels._lists import are_on, has_nested
from impl.kernels._native.memory import ListLayout, list_layout

_MOST_LISTS = 32
# Guards end the process if they reach a strided nested tensor, because torch throws in code that cannot be unwound. So
# tensors are checked first: all of them in short lists. In lists with twice this number or more, only about as many are
# checked, spread over the list, because a check of all would take up to a tenth of the time of clipping.
_CHECKED_TENSORS = 16
_DEVICE_TYPES = ("cpu", "cuda")


class _KeptLayout(NamedTuple):
    guards: TensorGuards  # guards hold no tensors
    layout: ListLayout


_kept: dict[tuple[int, torch.dtype], _KeptLayout] = {}
_lock = Lock()


def tensor_guards(tensors: list[Tensor], *, with_layouts: bool = True) -> TensorGuards:
    """Return guards on type, device, dtype and layout of these tensors, and on their autograd keys.

    Guards `with_layouts` include shapes, and the strides of strided tensors. The guards reject a list that holds a
    tensor twice. Neither these tensors nor those that are checked may be nested (see `_CHECKED_TENSORS`).
    """
    free: list[Any] = [[None] * tensor.dim() for tensor in tensors]
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors] if with_layouts else free
    strides: list[Any] = [
        list(tensor.stride()) if with_layouts and tensor.layout is torch.strided else none
        for tensor, none in zip(tensors, free, strict=True)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


def recognize_layout(tensors: list[Tensor]) -> ListLayout | None:
    """Return the cached layout of the tensors, or None if `keep_layout` got no list of this layout lately."""
    if not tensors or not _can_guard():
        return None
    cached = _kept.get((len(tensors), tensors[0].dtype))
    if (
        cached is None
        or has_nested(tensors[:: len(tensors) // _CHECKED_TENSORS or 1])
        or not cached.guards.check(*tensors)
    ):
        return None
    return cached.layout


def keep_layout(tensors: list[Tensor]) -> ListLayout | None:
    """Return the layout of the tensors, and cache it for later lists.

    Args:
        tensors: a non-empty list of plain strided tensors, none of them an inference tensor.

    Returns:
        None if they are on several devices, or on another one than the CPU and CUDA, or if `list_layout` returns None.
    """
    device = tensors[0].device
    if device.type not in _DEVICE_TYPES or not are_on(device, tensors):
        return None
    layout = list_layout(tensors)
    if layout is None or not _can_guard():
        return layout
    cached = _KeptLayout(tensor_guards(tensors), layout)
    with _lock:
        _kept.pop(key := (len(tensors), tensors[0].dtype), None)
        _kept[key] = cached
        if len(_kept) > _MOST_LISTS:
            del _kept[next(iter(_kept))]
    return layout


def _can_guard() -> bool:
    # In inference mode guards cannot distinguish inference tensors. Dynamo cannot trace guards.
    return not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()

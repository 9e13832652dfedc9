"""Types and dtypes that kernels support, and queries of all tensors of a list.

The queries use no Python loop, which would take longer than some of the kernels. Do not call them in compiled code,
because Dynamo does not support `attrgetter`.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
HALVES = frozenset((torch.float16, torch.bfloat16))
KERNEL_DTYPES = HALVES | {torch.float32, torch.float64}

_device, _dtype, _is_cpu, _is_nested, _layout = map(
    attrgetter, ("device", "dtype", "is_cpu", "is_nested", "layout")
)


def dtypes_of(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    return set(map(_dtype, tensors))


def layouts_of(tensors: Sequence[Tensor]) -> set[torch.layout]:
    return set(map(_layout, tensors))


def has_nested(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tensor is nested. A strided nested tensor is a plain one by type and layout, without shape."""
    return any(map(_is_nested, tensors))


def is_plain_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one with shape and strides."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def are_on(device: torch.device, tensors: Sequence[Tensor]) -> bool:
    return all(map(_is_cpu, tensors)) if device.type == "cpu" else set(map(_device, tensors)) == {device}

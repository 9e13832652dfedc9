"""Clamping of a list of tensors in one pass over memory."""

import math

import torch

from impl.kernels._native import NativeLibrary
from impl.kernels._native.memory import TensorList


def clamp(library: NativeLibrary, tensors: TensorList, low: float, high: float) -> bool:
    """Clamp every element in place to [`low`, `high`], like `impl.kernels.clamp_`.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        low, high: rounded to the tensors' dtype.

    Returns:
        False, without a change, if the library does not support the tensors, or a bound is nan or exceeds their dtype.
    Sync: none.
    """
    most = torch.finfo(tensors.tensors[0].dtype).max
    if not all(abs(bound) <= most or math.isinf(bound) for bound in (low, high)):
        return False
    written = tensors.memory
    if written is None:
        return False
    library.clamp(*library.lists(written.layout.numels), written.list, low, high)
    torch.autograd.graph.increment_version(tensors.tensors)
    return True

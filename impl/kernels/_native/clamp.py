"""Clamping of a list of tensors in one pass over memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._native import NativeLibrary
from impl.kernels._native.memory import tensors_to_read


def clamp(library: NativeLibrary, tensors: Sequence[Tensor], low: float, high: float) -> bool:
    """Clamp every element in place to [`low`, `high`], like `impl.kernels.clamp_`.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        low, high: rounded to the tensors' dtype.

    Returns:
        False, without a change, if the library does not support the tensors, or a bound is nan or exceeds their dtype.
    Sync: none.
    """
    most = torch.finfo(tensors[0].dtype).max
    if not all(abs(bound) <= most or math.isinf(bound) for bound in (low, high)):
        return False
    written = tensors_to_read(tensors)
    if written is None:
        return False
    library.clamp(*library.lists(written.form.numels), written.list, low, high)
    torch.autograd.graph.increment_version(tensors)
    return True

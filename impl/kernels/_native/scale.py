"""Multiplication of a list of tensors by a factor in one pass over memory."""

import torch

from impl.kernels._native import NativeLibrary
from impl.kernels._native.memory import TensorList


def scale(library: NativeLibrary, tensors: TensorList, factor: float) -> bool:
    """Multiply every element in place by `factor`, like `impl.kernels.scale_`.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        factor: rounded to f32.

    Returns:
        False, without a change, if the library does not support the tensors.
    Sync: none.
    """
    written = tensors.memory
    if written is None:
        return False
    library.scale(*library.lists(written.layout.numels), written.list, factor)
    torch.autograd.graph.increment_version(tensors.tensors)
    return True

"""Multiplication of a list of tensors by a factor in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._native import NativeLibrary
from impl.kernels._native.memory import tensors_to_read


def scale(library: NativeLibrary, tensors: Sequence[Tensor], factor: float) -> bool:
    """Multiply every element in place by `factor`, like `impl.kernels.scale_`.

    Args:
        tensors: a non-empty list of dense tensors on the CPU.
        factor: rounded to f32.

    Returns:
        False, without a change, if the library does not support the tensors.
    Sync: none.
    """
    written = tensors_to_read(tensors)
    if written is None:
        return False
    library.scale(*library.lists(written.form.numels), written.list, factor)
    torch.autograd.graph.increment_version(tensors)
    return True

"""Multiplication of a list of tensors by one factor, in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._native import NativeLibrary
from impl.kernels._native.memory import tensors_to_read


def scale(library: NativeLibrary, tensors: Sequence[Tensor], factor: float) -> bool:
    """Multiply every element in place by `factor`, an f32, as `impl.kernels.scale_`.

    Args:
        tensors: dense ones on the CPU; not empty.

    Returns:
        False if the library cannot take the tensors; nothing is changed then.
    Sync: none.
    """
    written = tensors_to_read(tensors)
    if written is None:
        return False
    library.scale(*library.lists(written.form.numels), written.list, factor)
    torch.autograd.graph.increment_version(tensors)
    return True

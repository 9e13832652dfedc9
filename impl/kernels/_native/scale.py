"""Tensors times a number, in one pass over memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._native import Library, tensors_to_write


def scale(library: Library, tensors: Sequence[Tensor], factor: float) -> bool:
    """Multiply in place by a number that is an f32; False, with nothing changed, if the library cannot take them."""
    written = tensors_to_write(tensors)
    if written is None:
        return False
    library.scale(*library.lists(written.numels), written.list, factor)
    torch.autograd.graph.increment_version([*tensors])
    return True

"""Scale tensors by one factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach


@torch.no_grad()
def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`.

    Args:
        tensors: dense tensors of any shape and of mixed dtypes on one device; not empty.
        factor: 0-dim, on that device.

    Sync: none. Collectives: none.
    """
    _scale_plain(tensors, factor)


def _scale_plain(tensors: Sequence[Tensor], factor: Tensor) -> None:
    for same_dtype in by_dtype(tensors):
        if takes_foreach(same_dtype):
            torch._foreach_mul_(same_dtype, factor)
        else:
            for t in same_dtype:
                t.mul_(factor)

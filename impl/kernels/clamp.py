"""Clamp tensors between two bounds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach


@torch.no_grad()
def clamp_(tensors: Sequence[Tensor], low: float, high: float) -> None:
    """Clamp every element in place to [`low`, `high`]; nan stays nan.

    Args:
        tensors: dense tensors of any shape and of mixed dtypes on one device; not empty.
        low: lower bound, in the tensors' unit.
        high: upper bound; where it lies below `low`, every element becomes `high`.

    Sync: none. Collectives: none.
    """
    _clamp_plain(tensors, low, high)


def _clamp_plain(tensors: Sequence[Tensor], low: float, high: float) -> None:
    for same_dtype in by_dtype(tensors):
        if takes_foreach(same_dtype):
            torch._foreach_clamp_min_(same_dtype, low)
            torch._foreach_clamp_max_(same_dtype, high)
        else:
            for t in same_dtype:
                t.clamp_(min=low, max=high)

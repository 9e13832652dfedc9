"""Lists with one dtype each, as torch's multi-tensor operators need them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support


def by_dtype(tensors: Sequence[Tensor], dtypes: set[torch.dtype]) -> list[list[Tensor]]:
    """Split a list by dtype, in the order of torch's own modules, so that sums agree bit by bit."""
    if len(dtypes) == 1:
        return [list(tensors)]
    groups = _group_tensors_by_device_and_dtype([list(tensors)])
    return [cast("list[Tensor]", same_dtype) for [same_dtype], _ in groups.values()]


def takes_foreach(same_dtype: list[Tensor]) -> bool:
    """Return whether torch would use a `_foreach` operator for this list rather than a loop."""
    return _has_foreach_support(same_dtype, same_dtype[0].device)

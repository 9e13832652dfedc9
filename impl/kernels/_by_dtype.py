"""Lists with one dtype each, as torch's multi-tensor operators need them.

Shared memory
    On a device a multi-tensor operator changes all tensors of a list at the same time. If two of them share memory,
    both may read an element before one of them writes it, so that it is changed once instead of twice. On the CPU the
    operators change one tensor after the other. `lists_to_change` makes every device do so.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from impl.kernels._dispatch import Dispatch, is_eager
from impl.kernels._lists import layouts_of
from impl.kernels._native import Column
from impl.kernels._native.memory import Addresses
from impl.kernels._table import are_disjoint, numbers_in

_nbytes = attrgetter("nbytes")


def by_dtype(tensors: Sequence[Tensor], dtypes: set[torch.dtype]) -> list[list[Tensor]]:
    """Split a list by dtype, in the order of torch's own modules, so that sums agree bit by bit."""
    if len(dtypes) == 1:
        return [list(tensors)]
    groups = _group_tensors_by_device_and_dtype([list(tensors)])
    return [cast("list[Tensor]", same_dtype) for [same_dtype], _ in groups.values()]


def lists_to_change(tensors: Sequence[Tensor], dispatch: Dispatch) -> list[list[Tensor]]:
    """Return lists that torch's multi-tensor operators may change in place, one list after the other.

    They are the lists of `by_dtype`. If tensors on a device may share memory, each list has a single tensor.
    """
    lists = by_dtype(tensors, dispatch.dtypes)
    if changes_in_turn(tensors, dispatch):
        return [[tensor] for same_dtype in lists for tensor in same_dtype]
    return lists


def changes_in_turn(tensors: Sequence[Tensor], dispatch: Dispatch) -> bool:
    """Return whether each of the tensors needs its own operator call, because they may share memory on a device."""
    return dispatch.backend != "cpu_blocked" and dispatch.is_eager and may_share_memory(tensors)


def foreach_slices(tensors: Sequence[Tensor]) -> list[slice]:
    """Return slices of a list that torch's multi-tensor operators may change in place, one slice after the other.

    There is one slice, or one for each tensor if some may share memory on a device.

    Args:
        tensors: tensors of any type and layout on one device.
    """
    is_shared = (
        len(tensors) > 1
        and not tensors[0].is_cpu
        and is_eager(tensors)
        and layouts_of(tensors) == {torch.strided}
        and may_share_memory(tensors)
    )
    step = 1 if is_shared else len(tensors) or 1
    return [slice(start, start + step) for start in range(0, len(tensors), step)]


def may_share_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether the ranges of memory of two tensors overlap, even if none of their elements do.

    Args:
        tensors: strided tensors whose addresses may be read.

    Sync: none.
    """
    if len(tensors) < 2:
        return False
    start_T = _as_tensor(Addresses(tensors).column)  # T = tensors
    are_contiguous = all(map(Tensor.is_contiguous, tensors))
    bytes_T = _as_tensor(Column(map(_nbytes if are_contiguous else _range_bytes, tensors)))
    # Tensors without memory, like torch's zero tensors, share none.
    return not are_disjoint(start_T, start_T + bytes_T * (start_T != 0))


def _as_tensor(column: Column) -> Tensor:
    return numbers_in(column.numbers.tobytes())


def _range_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def takes_foreach(same_dtype: list[Tensor]) -> bool:
    """Return whether torch would use a `_foreach` operator for this list rather than a loop."""
    return _has_foreach_support(same_dtype, same_dtype[0].device)

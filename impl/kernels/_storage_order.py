"""Tensors as one-dimensional ranges of memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# A tensor of at least this size gets its own operator call. Smaller ones are copied into one buffer first.
_LARGE = 1 << 14
# Elements of that buffer, which stays in the cache until it is read.
_RUN = 1 << 17

# torch's error for writing to a tensor whose elements share memory.
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are non-overlapping and dense, in any order of dimensions."""
    return all(map(Tensor.is_contiguous, tensors)) or all(
        t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t) for t in tensors
    )


def match_layout(param: Tensor, grad: Tensor) -> Tensor:
    """Return `grad`, or a copy with the memory order of `param` if it has another one."""
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a 1-D view of all elements in the order of memory, or None if they have gaps or overlap."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    outermost_first = sorted(
        range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True
    )
    permuted = tensor.permute(outermost_first)
    return permuted.view(-1) if permuted.is_contiguous() else None


def flat_runs(same_dtype: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield 1-D tensors with every element once. Large tensors are views if possible, small ones are concatenated."""
    small: list[Tensor] = []
    room = _RUN
    for tensor in same_dtype:
        numel = tensor.numel()
        if numel >= _LARGE:
            flat = flat_view(tensor)
            yield tensor.reshape(-1) if flat is None else flat
        elif numel:
            small.append(tensor)
            room -= numel
            if room <= 0:
                yield _concat(small)
                small, room = [], _RUN
    if small:
        yield _concat(small)


def _concat(tensors: list[Tensor]) -> Tensor:
    if set(map(Tensor.dim, tensors)) == {1}:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    # This flattens in C++, in half of the time of a loop in Python.
    return _flatten_dense_tensors(tensors)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of `tensor` have the same address."""
    overlap = torch._debug_has_internal_overlap(tensor)
    if overlap < 2:  # torch returns 2 if it does not know
        return overlap == 1
    # In the order of growing strides, a dimension that steps over all previous ones cannot overlap with them.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return _has_equal_offsets(tensor)
        reach += stride * (size - 1)
    return False


def _has_equal_offsets(tensor: Tensor) -> bool:
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = (offsets[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return offsets.unique().numel() < offsets.numel()

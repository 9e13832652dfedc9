"""Tensors as one-dimensional runs of memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# From here on a tensor is worth an operator call of its own; smaller ones are copied together first.
_LARGE = 1 << 14
# Elements copied together at a time: what was copied is still in the cache when it is read again.
_RUN = 1 << 17

# What torch raises where it sees that elements of a tensor to be written share memory.
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether the elements of each lie without gaps and once, in whatever order of dimensions."""
    return all(map(Tensor.is_contiguous, tensors)) or all(
        t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t) for t in tensors
    )


def laid_out_as(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient, or a copy of it where its elements lie in memory in another order than the parameter's."""
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def flat_view(tensor: Tensor) -> Tensor | None:
    """All elements in the order of memory as a 1-D view, or None if there are gaps or elements lie twice."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    outermost_first = sorted(
        range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True
    )
    permuted = tensor.permute(outermost_first)
    return permuted.view(-1) if permuted.is_contiguous() else None


def flat_runs(same_dtype: Sequence[Tensor]) -> Iterator[Tensor]:
    """Every element once, in 1-D tensors: large tensors as views where they can be, small ones copied together."""
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
                yield _joined(small)
                small, room = [], _RUN
    if small:
        yield _joined(small)


def _joined(tensors: list[Tensor]) -> Tensor:
    if set(map(Tensor.dim, tensors)) == {1}:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    # Flattened one by one in C++, which takes half of the time of doing it from here.
    return _flatten_dense_tensors(tensors)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of `tensor` lie at one address, so that what is done to one is done to the other."""
    overlap = torch._debug_has_internal_overlap(tensor)
    if overlap < 2:  # 2: it would take a closer look
        return overlap == 1
    # Laid out by growing stride, a dimension that steps over all the ones before it can meet none of them.
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

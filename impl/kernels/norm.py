"""Joint p-norm of a list of tensors."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import cpu_library, dispatch_for
from impl.kernels._native.memory import TensorList
from impl.kernels._native.norm import ChunkSquares, sum_of_squares
from impl.kernels._storage_order import flat_runs

# A sum in f32 loses summands that are far smaller than itself. So no sum is longer than a row, and small gradients in
# one buffer with large ones still count. Also, torch takes the norm of one tensor on one thread, but norms of rows on
# all.
_ROW = 1 << 9
# Up to this size a single tensor takes one norm on one thread, because rows would take twice the time.
_SHORT = 1 << 12
# From this size on, concatenating tensors and searching their extremes is faster than a norm of each.
_WORTH_A_SEARCH = 1 << 14
# Elements widened at a time, so that the wide copy stays in the cache.
_PIECE = 1 << 17
# Below this, a two-norm summed in f32 may have lost squares to underflow. Above it, up to 2**42 lost squares, each
# under 2**-126, are at most 2**-24 of the sum of squares.
_SAFE_ABOVE = 2.0**-30


@no_grad_fast
def total_norm(tensors: TensorList, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return the joint p-norm, as if all tensors were concatenated into one vector.

    The two-norm does not overflow or underflow if its value can be represented.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        norm_type: any float, inf and -inf included. As in torch, 0 counts the tensors that are not all zero.
        dtype: dtype of the result and of the summands. Defaults to the promotion of the tensors' dtypes, but f32 if all
            are f16.

    Returns:
        0-dim, on that device.

    Raises:
        RuntimeError: torch's, for inf or negative `norm_type` with an empty tensor, and for integer tensors.
    Sync: none. Collectives: none.
    Source: torch.nn.utils.get_total_norm 2.13; differences: f32 for f16, and no intermediate overflow. Without Triton,
        tensor subclasses, traced code and other devices than the CPU have torch's range.
    """
    dispatch = dispatch_for(tensors)
    expected = dtype or result_dtype(dispatch.dtypes)
    if dispatch.backend == "triton":
        from impl.kernels._triton.norm import launch_norm  # noqa: PLC0415  optional, and slow to import

        norm = launch_norm(tensors, norm_type, expected)
        if norm is not None:
            return norm
    elif dispatch.backend == "cpu_blocked" and norm_type == math.inf and _is_worth_a_search(tensors.tensors):
        return _largest(by_dtype(tensors.tensors, dispatch.dtypes)).to(expected)
    elif (
        dispatch.backend == "cpu_blocked"
        and norm_type == 2
        and (squares := squares_by_library(tensors, even_if_few=False)) is not None
    ):
        return torch.tensor(math.sqrt(squares), dtype=expected, device="cpu")
    groups = by_dtype(tensors.tensors, dispatch.dtypes)
    if norm_type != 2:
        return _norm_by_torch(groups, norm_type, dtype)
    if dispatch.backend == "cpu_blocked":
        norm = _two_norm_cpu_blocked(groups, expected, widens=dtype is not None)
    else:
        norm = _norm_by_torch(groups, norm_type, dtype)
    if dispatch.is_eager and norm.is_cpu:
        value = norm.item()
        if value < _SAFE_ABOVE or value == math.inf:
            return _two_norm_by_largest(tensors.tensors).to(norm.dtype)
    return norm


def squares_by_library(
    tensors: TensorList,
    even_if_few: bool,
    square_T: Tensor | None = None,
    known: Mapping[int, ChunkSquares] | None = None,
) -> float | None:
    """Return the sum of squares in f64 on the CPU, or None if the CPU library is missing or cannot take the tensors.

    Args:
        square_T: [T] f64 for T tensors, written: the sum of squares of each tensor.
        known: sums that were taken before, by the tensor's address.
    """
    library = cpu_library(None if even_if_few else tensors)
    return None if library is None else sum_of_squares(library, tensors, square_T, known)


def result_dtype(dtypes: set[torch.dtype]) -> torch.dtype:
    return torch.float32 if dtypes == {torch.float16} else reduce(torch.promote_types, dtypes)


def _norm_by_torch(groups: list[list[Tensor]], norm_type: float, dtype: torch.dtype | None) -> Tensor:
    norms: list[Tensor] = []
    for same_dtype in groups:
        # In f16 the norm of finite gradients soon passes 65504.
        wide = dtype or (torch.float32 if same_dtype[0].dtype is torch.float16 else None)
        if takes_foreach(same_dtype):
            norms.extend(torch._foreach_norm(same_dtype, norm_type, dtype=wide))
        else:
            norms.extend(torch.linalg.vector_norm(t, norm_type, dtype=wide) for t in same_dtype)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _two_norm_cpu_blocked(groups: list[list[Tensor]], dtype: torch.dtype, widens: bool) -> Tensor:
    """Return the two-norm on the CPU. It reads 4 B an element in f32, and concatenates small tensors."""
    match groups:
        case [[tensor]] if tensor.numel() <= _SHORT:
            return torch.linalg.vector_norm(tensor, dtype=dtype)
        case _:
            pass
    norms: list[Tensor] = []
    for same_dtype in groups:
        for flat in flat_runs(same_dtype):
            _append_norms(norms, flat, widens)
    if len(norms) == 1 and norms[0].numel() == 1:
        norm = norms[0].squeeze_(0)
        return norm if norm.dtype is dtype else norm.to(dtype)
    if not norms:
        return torch.zeros((), dtype=dtype, device="cpu")
    accumulate = torch.float64 if dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(torch.cat(norms), dtype=accumulate).to(dtype)


def _append_norms(norms: list[Tensor], flat: Tensor, widens: bool) -> None:
    """Append two-norms of the pieces of a 1-D tensor. They are f32 for f16, and for bf16 if `widens`."""
    if flat.dtype is torch.float16 or (widens and flat.dtype is torch.bfloat16):
        # torch sums slowly into another dtype and in f16, and a norm in f16 may overflow.
        norms.extend(torch.linalg.vector_norm(piece.float(), keepdim=True) for piece in flat.split(_PIECE))
        return
    if flat.numel() > _ROW:
        rows_numel = flat.numel() - flat.numel() % _ROW
        norms.append(torch.linalg.vector_norm(flat[:rows_numel].view(-1, _ROW), dim=1))
        flat = flat[rows_numel:]
    if flat.numel():
        norms.append(torch.linalg.vector_norm(flat, keepdim=True))


def _is_worth_a_search(tensors: Sequence[Tensor]) -> bool:
    lengths = [t.numel() for t in tensors]
    return sum(lengths) >= _WORTH_A_SEARCH and all(lengths)


def _largest(groups: list[list[Tensor]]) -> Tensor:
    """Return the largest magnitude, 0-dim f64, or nan if an element is nan."""
    flats = [flat for same_dtype in groups for flat in flat_runs(same_dtype)]
    extremes = [extreme.double() for flat in flats for extreme in torch.aminmax(flat)]
    return torch.stack(extremes).abs().amax()


def _two_norm_by_largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the two-norm of any finite values, 0-dim f64. Division by the largest avoids overflow of squares."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors if t.numel()]
    largest = _largest(by_dtype(real, {t.dtype for t in real})) if real else torch.zeros((), device="cpu")
    if largest == 0 or not largest.isfinite():
        return largest
    norms = [
        torch.linalg.vector_norm(piece.double() / largest)
        for t in real
        for piece in t.reshape(-1).split(_PIECE)
    ]
    return torch.linalg.vector_norm(torch.stack(norms)).mul_(largest)

"""The joint p-norm of a list of tensors."""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach
from impl.kernels._dispatch import cpu_library, dispatch_for
from impl.kernels._native.norm import sum_of_squares
from impl.kernels._no_grad_fast import no_grad_fast
from impl.kernels._storage_order import flat_runs

# A sum in f32 loses what is far smaller than itself, so no sum is longer than a row: small gradients that stand in one
# buffer with large ones count. Besides, torch takes the norm of a whole tensor on one thread, those of rows on all.
_ROW = 1 << 9
# Up to here a tensor that is alone takes one norm, on one thread: rows and a norm of theirs would take twice the time.
_SHORT = 1 << 12
# Elements from which on to join tensors and look for their extremes takes less time than a norm of each.
_WORTH_A_SEARCH = 1 << 14
# Elements widened at a time, so that the wide copy stays in the cache.
_PART = 1 << 17
# Below this a two-norm summed in f32 may have lost squares to underflow: with up to 2**42 elements the lost ones,
# each under 2**-126, reach at most 2**-24 of the sum of squares above it.
_SAFE_ABOVE = 2.0**-30


@no_grad_fast
def total_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
    """Joint p-norm, as if all elements stood in one vector.

    The two-norm does not overflow or underflow where its value can be represented.

    Args:
        tensors: dense tensors of any shape and of mixed dtypes on one device; not empty.
        norm_type: any float, inf and -inf included. As in torch, 0 counts the tensors that are not all zero.
        dtype: of the result and of what it is summed from; None is the one that the tensors' dtypes promote to, but f32
            for f16 alone.

    Returns:
        0-dim, on that device.

    Raises:
        RuntimeError: torch's: inf or negative `norm_type` with an empty tensor, integer tensors.
    Sync: none. Collectives: none.
    Source: torch.nn.utils.get_total_norm 2.13; differences: f32 for f16, and the safety. Where values may not be
        looked at and Triton does not run (tensor subclasses, traced code, other devices) torch's limits hold.
    """
    dispatch = dispatch_for(tensors)
    expected = dtype or result_dtype(dispatch.dtypes)
    if dispatch.backend == "triton":
        from impl.kernels._triton.norm import launch_norm  # noqa: PLC0415  optional, and slow to import

        norm = launch_norm(tensors, norm_type, expected)
        if norm is not None:
            return norm
    elif dispatch.backend == "cpu_blocked" and norm_type == math.inf and _is_worth_a_search(tensors):
        return _largest(by_dtype(tensors, dispatch.dtypes)).to(expected)
    elif (
        dispatch.backend == "cpu_blocked"
        and norm_type == 2
        and (squares := squares_by_library(tensors, even_if_few=False)) is not None
    ):
        return torch.tensor(math.sqrt(squares), dtype=expected, device="cpu")
    groups = by_dtype(tensors, dispatch.dtypes)
    if norm_type != 2:
        return _norm_by_torch(groups, norm_type, dtype)
    if dispatch.backend == "cpu_blocked":
        norm = _two_norm_cpu_blocked(groups, expected, widens=dtype is not None)
    else:
        norm = _norm_by_torch(groups, norm_type, dtype)
    if dispatch.is_eager and norm.is_cpu:
        value = norm.item()
        if value < _SAFE_ABOVE or value == math.inf:
            return _two_norm_by_largest(tensors).to(norm.dtype)
    return norm


def squares_by_library(tensors: Sequence[Tensor], even_if_few: bool) -> float | None:
    """The sum of squares in f64, on the CPU; None where the library is not there, or cannot take the tensors."""
    library = cpu_library(None if even_if_few else tensors)
    return None if library is None else sum_of_squares(library, tensors)


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
    """Two-norm on the CPU: 4 B an element in f32, large tensors on all threads, small ones copied together."""
    match groups:
        case [[alone]] if alone.numel() <= _SHORT:
            return torch.linalg.vector_norm(alone, dtype=dtype)
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
    """Append 1-D two-norms of parts that together cover a 1-D tensor; in f32 where it holds f16, or bf16 and widens."""
    if flat.dtype is torch.float16 or (widens and flat.dtype is torch.bfloat16):
        # torch sums slowly into another dtype, as it does f16, and a norm in f16 would overflow.
        norms.extend(torch.linalg.vector_norm(part.float(), keepdim=True) for part in flat.split(_PART))
        return
    if flat.numel() > _ROW:
        whole = flat.numel() - flat.numel() % _ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        flat = flat[whole:]
    if flat.numel():
        norms.append(torch.linalg.vector_norm(flat, keepdim=True))


def _is_worth_a_search(tensors: Sequence[Tensor]) -> bool:
    lengths = [t.numel() for t in tensors]
    return sum(lengths) >= _WORTH_A_SEARCH and all(lengths)


def _largest(groups: list[list[Tensor]]) -> Tensor:
    """Largest magnitude, 0-dim f64; nan where there is one."""
    flats = [flat for same_dtype in groups for flat in flat_runs(same_dtype)]
    extremes = [extreme.double() for flat in flats for extreme in torch.aminmax(flat)]
    return torch.stack(extremes).abs().amax()


def _two_norm_by_largest(tensors: Sequence[Tensor]) -> Tensor:
    """Two-norm of any finite values, 0-dim f64: in units of the largest no square overflows."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors if t.numel()]
    largest = _largest(by_dtype(real, {t.dtype for t in real})) if real else torch.zeros((), device="cpu")
    if largest == 0 or not largest.isfinite():
        return largest
    norms = [
        torch.linalg.vector_norm(part.double().div_(largest))
        for t in real
        for part in t.reshape(-1).split(_PART)
    ]
    return torch.linalg.vector_norm(torch.stack(norms)).mul_(largest)

"""Scale tensors by one factor, or to a norm."""

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, lists_to_change, takes_foreach
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import Dispatch, cpu_library, dispatch_for
from impl.kernels._lists import HALVES
from impl.kernels._native.memory import TensorList
from impl.kernels._native.scale import scale

# torch's unscale operator is faster than multiplication for lists of more than _FEW tensors in half precision that are
# shorter than _LONG.
_FEW = 4
_LONG = 1 << 17


@no_grad_fast
def scale_(tensors: TensorList, factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, which may be any number. Only tests and benchmarks call it.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        factor: 0-dim, on that device.

    Sync: none. Collectives: none.
    """
    dispatch = dispatch_for(tensors)
    if dispatch.backend == "triton":
        from impl.kernels._triton.scale import launch_scale  # noqa: PLC0415  optional, and slow to import

        if launch_scale(tensors, factor):
            return
    _scale_without_triton(tensors, dispatch, factor)


@no_grad_fast
def clip_(tensors: TensorList, max_norm: float, total_norm: Tensor) -> None:
    """Multiply tensors in place by `clip_coefficient(max_norm, total_norm)`.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        max_norm: any float.
        total_norm: 0-dim, on that device.

    Sync: none. Collectives: none.
    """
    dispatch = dispatch_for(tensors)
    if dispatch.backend == "triton":
        from impl.kernels._triton.scale import launch_clip  # noqa: PLC0415  optional, and slow to import

        if launch_clip(tensors, max_norm, total_norm):
            return
    _scale_without_triton(tensors, dispatch, clip_coefficient(max_norm, total_norm))


def clip_coefficient(max_norm: float, total_norm: Tensor) -> Tensor:
    """Return `max_norm / (total_norm + 1e-6)`, at most 1, computed like torch by the reciprocal."""
    if type(total_norm) is Tensor:
        return (total_norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _scale_without_triton(tensors: TensorList, dispatch: Dispatch, factor: Tensor) -> None:
    if dispatch.backend == "cpu_blocked":
        _scale_cpu_blocked(tensors, dispatch.dtypes, factor)
    else:
        _scale_by_torch(lists_to_change(tensors.tensors, dispatch), factor)


def _scale_by_torch(groups: list[list[Tensor]], factor: Tensor) -> None:
    for same_dtype in groups:
        if takes_foreach(same_dtype):
            torch._foreach_mul_(same_dtype, factor)
        else:
            for t in same_dtype:
                t.mul_(factor)


def _scale_cpu_blocked(tensors: TensorList, dtypes: set[torch.dtype], factor: Tensor) -> None:
    """Scale on the CPU. If the factor is 1, make no pass at all."""
    number = factor.item()
    if number == 1:
        return
    is_wide = factor.dtype is torch.float64
    library = None if is_wide else cpu_library(tensors)
    if library is not None and scale(library, tensors, number):
        return
    for same_dtype in by_dtype(tensors.tensors, dtypes):
        if len(same_dtype) > _FEW and same_dtype[0].dtype in HALVES and not is_wide:
            _scale_halves(same_dtype, factor.float())
        else:
            torch._foreach_mul_(same_dtype, factor)


def _scale_halves(same_dtype: list[Tensor], factor: Tensor) -> None:
    """Compute the same products, rounded once, in a quarter of the time for small tensors."""
    short = [t for t in same_dtype if t.numel() < _LONG]
    long = [t for t in same_dtype if t.numel() >= _LONG]
    if short:
        ignored = torch.zeros((), dtype=torch.float32, device="cpu")
        torch._amp_foreach_non_finite_check_and_unscale_(short, ignored, factor)
    if long:
        torch._foreach_mul_(long, factor)

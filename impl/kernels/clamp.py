"""Clamp tensors between two bounds."""

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import cpu_library, dispatch_for, is_eager, requested_backend
from impl.kernels._native.clamp import clamp
from impl.kernels._native.memory import TensorList

# A tensor of at least this size gets its own operator call.
_LARGE = 1 << 14


@no_grad_fast
def clamp_(tensors: TensorList, low: float, high: float) -> None:
    """Clamp every element in place to [`low`, `high`]. NaN stays NaN.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        low: lower bound, in the tensors' unit.
        high: upper bound. If it is below `low`, every element becomes `high`.

    Sync: none. Collectives: none.
    """
    # The condition of "cpu_blocked" in `dispatch_for`, without its set of dtypes, which slows small lists.
    if (
        tensors.tensors[0].is_cpu
        and requested_backend() in ("auto", "cpu_blocked", "native")
        and is_eager(tensors.representatives)
    ):
        _clamp_cpu_blocked(tensors, low, high)
        return
    dispatch = dispatch_for(tensors)
    if dispatch.backend == "triton":
        from impl.kernels._triton.clamp import launch_clamp  # noqa: PLC0415  optional, and slow to import

        if launch_clamp(tensors, low, high):
            return
    _clamp_by_torch(by_dtype(tensors.tensors, dispatch.dtypes), low, high)


def _clamp_by_torch(groups: list[list[Tensor]], low: float, high: float) -> None:
    for same_dtype in groups:
        if takes_foreach(same_dtype):
            torch._foreach_clamp_min_(same_dtype, low)
            torch._foreach_clamp_max_(same_dtype, high)
        else:
            for t in same_dtype:
                t.clamp_(min=low, max=high)


def _clamp_cpu_blocked(tensors: TensorList, low: float, high: float) -> None:
    """Clamp on the CPU in one pass over memory, 8 B an element in f32, instead of one pass for each bound."""
    library = cpu_library(tensors)
    if library is not None and clamp(library, tensors, low, high):
        return
    numels = list(map(Tensor.numel, tensors.tensors))
    if max(numels) < _LARGE:
        small = [*tensors.tensors]
    else:
        small = [t for t, numel in zip(tensors.tensors, numels, strict=True) if numel < _LARGE]
        for t, numel in zip(tensors.tensors, numels, strict=True):
            if numel >= _LARGE:
                t.clamp_(low, high)
    # Small tensors stay in the cache between the bounds, and the loop over them is faster in C++.
    if small:
        torch._foreach_clamp_min_(small, low)
        torch._foreach_clamp_max_(small, high)

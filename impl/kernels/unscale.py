"""Unscaling of gradients with a check for inf and nan."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._by_dtype import lists_to_change
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import dispatch_for, requested_backend
from impl.kernels._native.memory import TensorList


@no_grad_fast
def unscale_(grads: TensorList, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients in place by `inv_scale`, and set `found_inf` if one holds inf or nan.

    Args:
        grads: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        inv_scale: f32, one element, on that device.
        found_inf: f32, one element, on that device. It is set to 1.0 or not changed, never cleared.

    Sync: none. Collectives: none.
    Source: torch._amp_foreach_non_finite_check_and_unscale_; differences: mixed dtypes in one call, and on CUDA
        bfloat16 and finite float64 above float32's range.
    """
    _unscale(grads, inv_scale, found_inf, is_inverse=True)


@no_grad_fast
def unscale_by_(grads: TensorList, scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients in place by `inverse(scale)`, and set `found_inf` if one holds inf or nan.

    Args:
        grads: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        scale: f32, 0-dim, on that device.
        found_inf: f32, one element, on that device. It is set to 1.0 or not changed, never cleared.

    Sync: none. Collectives: none.
    """
    _unscale(grads, scale, found_inf, is_inverse=False)


def _unscale(grads: TensorList, scale: Tensor, found_inf: Tensor, is_inverse: bool) -> None:
    if grads.tensors[0].is_cpu and requested_backend() != "triton":
        # On the CPU torch's operator supports mixed dtypes, and no other code is faster.
        inv_scale = scale if is_inverse else inverse(scale)
        torch._amp_foreach_non_finite_check_and_unscale_([*grads.tensors], found_inf, inv_scale)
        return
    dispatch = dispatch_for(grads)
    if dispatch.backend == "triton":
        from impl.kernels._triton.unscale import launch_unscale  # noqa: PLC0415  optional, and slow to import

        if launch_unscale(grads, scale, found_inf, is_inverse):
            return
    inv_scale = scale if is_inverse else inverse(scale)
    for same_dtype in lists_to_change(grads.tensors, dispatch):
        _unscale_by_torch(same_dtype, inv_scale, found_inf)


def _unscale_by_torch(same_dtype: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscale by torch's operator, except the dtypes for which its CUDA kernel is missing or wrong."""
    dtype, is_cpu = same_dtype[0].dtype, same_dtype[0].is_cpu
    if dtype is torch.bfloat16 and not is_cpu:
        # The CUDA kernel does not support bfloat16. One copy at a time takes little memory.
        for grad in same_dtype:
            wide = grad.float()
            torch._amp_foreach_non_finite_check_and_unscale_([wide], found_inf, inv_scale)
            grad.copy_(wide)
    elif dtype is torch.float64 and not is_cpu:
        # The CUDA kernel checks float64 in float32, in which large finite numbers are inf.
        for grad in same_dtype:
            nan_if_nonfinite = (grad - grad).float()
            torch._amp_foreach_non_finite_check_and_unscale_([nan_if_nonfinite], found_inf, inv_scale)
            grad.mul_(inv_scale)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale)


def inverse(scale: Tensor) -> Tensor:
    """Return `1 / scale` in f32, rounded to nearest."""
    # CPUs divide exactly in float32, and mps has no float64. On other devices a compiler may have used an approximate
    # division. Dividing in float64 gives the result of an exact division in float32.
    if scale.is_cpu or scale.is_mps:
        return scale.reciprocal()
    return scale.double().reciprocal().float()


@no_grad_fast
def nonfinite_counts(tensors: Sequence[Tensor]) -> Tensor:
    """Return how many elements of each tensor are inf or nan.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.

    Returns:
        i64 [len(tensors)] on that device.
    Sync: none. Collectives: none.
    """
    return torch.stack([t.isfinite().logical_not_().sum() for t in tensors])

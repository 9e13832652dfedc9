"""Joint p-norm of a list of tensors and a check for inf and nan, in one read-only pass."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import dispatch_for, requested_backend
from impl.kernels._lists import are_on
from impl.kernels._native.memory import TensorList
from impl.kernels._native.norm import ChunkSquares
from impl.kernels.norm import result_dtype, squares_by_library, total_norm

# Orders for which the norm of f32 and narrower tensors, summed in f64, is finite if and only if all elements are.
_TELLING = (1.0, 2.0, math.inf)


@no_grad_fast
def checked_norm(
    tensors: TensorList,
    norm_type: float,
    dtype: torch.dtype | None = None,
    norm_T: Tensor | None = None,
    known: Mapping[int, ChunkSquares] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the joint p-norm, like `total_norm`, and whether a tensor holds inf or nan.

    Args:
        tensors: a non-empty list of dense tensors of any shape and mixed dtypes on one device.
        norm_type: any float, inf and -inf included.
        dtype: dtype of the norm, as in `total_norm`.
        norm_T: [T] f64 for T tensors, on that device, written: the norm of each tensor. The CPU library and Triton's
            kernels take it from the same pass, torch's operators from a second one.
        known: sums of squares of some tensors' chunks, by the tensor's address. The CPU library reads only the others.

    Returns:
        The norm, like `total_norm`; and found_inf: f32, 0-dim, on that device, 1.0 if a tensor holds inf or nan, else
        0.0. A norm that is too large for its dtype is inf, even if found_inf is 0.0.

    Raises:
        RuntimeError: torch's, for inf or negative `norm_type` with an empty tensor, and for integer tensors.
    Sync: none. Collectives: none.
    """
    dispatch = dispatch_for(tensors)
    if dispatch.backend == "triton" and norm_type in _TELLING and torch.float64 not in dispatch.dtypes:
        from impl.kernels._triton.norm import launch_norm  # noqa: PLC0415  optional, and slow to import

        found_inf = torch.empty((), dtype=torch.float32, device=tensors.tensors[0].device)
        norm = launch_norm(tensors, norm_type, dtype or result_dtype(dispatch.dtypes), found_inf, norm_T)
        if norm is not None:
            return norm, found_inf
    if dispatch.backend == "cpu_blocked" and norm_type == 2.0:
        squares = squares_by_library(tensors, even_if_few=True, square_T=norm_T, known=known)
        if squares is not None:
            if norm_T is not None:
                norm_T.sqrt_()
            norm = torch.tensor(
                math.sqrt(squares), dtype=dtype or result_dtype(dispatch.dtypes), device="cpu"
            )
            return norm, _flag(not math.isfinite(squares), norm.device)
    norm = total_norm(tensors, norm_type, dtype)
    if norm_T is not None:
        wide = torch.promote_types(norm.dtype, torch.float32)
        norms = [total_norm(TensorList([tensor]), norm_type, wide) for tensor in tensors.tensors]
        torch.stack([norm.double() for norm in norms], out=norm_T)
    # A finite norm of positive order excludes inf and nan. On the CPU, reading the norm costs nothing.
    if dispatch.backend == "cpu_blocked" and norm_type > 0 and math.isfinite(norm.item()):
        return norm, _flag(False, norm.device)
    return norm, _found_inf_by_torch(by_dtype(tensors.tensors, dispatch.dtypes))


class StepNumbers(NamedTuple):
    """Numbers that a step from scaled gradients needs: 0-dim, on their device, and f32 except the norms."""

    scaled_norm: Tensor  # norm of `checked_norm`
    found_inf: Tensor  # flag of `checked_norm`
    norm: Tensor  # norm of the unscaled gradients, in the same dtype
    factor: Tensor  # factor that unscales and clips a scaled gradient
    taken: Tensor  # 1 - found_inf


@no_grad_fast
def step_numbers(  # noqa: PLR0913  all that the two launches compute
    tensors: TensorList,
    norm_type: float,
    scale: Tensor,
    max_norm: float,
    dtype: torch.dtype | None = None,
    norm_T: Tensor | None = None,
) -> StepNumbers | None:
    """Return the result of `checked_norm` and the numbers that depend on it, in the same two launches.

    Args:
        tensors: scaled gradients, dense, of any shape and mixed dtypes.
        norm_type: any float, inf and -inf included.
        scale: the loss scale: f32, 0-dim.
        max_norm: the unscaled gradients are clipped to this norm; inf does not clip.
        dtype: dtype of the norm, as in `total_norm`.
        norm_T: [T] f64 for T tensors, written unless the result is None: the norm of each unscaled gradient, by one
            more launch.

    Returns:
        The same numbers as torch's operators compute from the norm. None, without a launch, if Triton's kernels do not
        support the tensors, one is empty or not on the device of the scale, or a dtype is float64.
    Sync: none. Collectives: none.
    """
    grads = tensors.tensors
    if not grads or (scale.is_cpu and requested_backend() != "triton"):
        return None
    dispatch = dispatch_for(tensors)
    if dispatch.backend != "triton" or norm_type not in _TELLING:
        return None
    dtype = dtype or result_dtype(dispatch.dtypes)
    if torch.float64 in (*dispatch.dtypes, dtype):
        return None
    if grads[0].device != scale.device or not (
        tensors.layout is not None or (are_on(scale.device, grads) and all(map(Tensor.numel, grads)))
    ):
        return None
    from impl.kernels._triton.norm import launch_step_norm  # noqa: PLC0415  optional, and slow to import

    numbers = launch_step_norm(tensors, norm_type, dtype, scale, max_norm, norm_T)
    return None if numbers is None else StepNumbers(*numbers)


def _found_inf_by_torch(groups: list[list[Tensor]]) -> Tensor:
    """Check the largest magnitudes, which reads 4 B an element in f32 and writes nothing."""
    largest: list[Tensor] = []
    for same_dtype in groups:
        filled = [t for t in same_dtype if t.numel()]
        if filled and takes_foreach(filled):
            largest.extend(torch._foreach_norm(filled, math.inf))
        else:
            largest.extend(torch.linalg.vector_norm(t, math.inf) for t in filled)
    if not largest:
        return _flag(False, groups[0][0].device)
    return torch.stack([norm.double() for norm in largest]).isfinite().all().logical_not().float()


def _flag(is_set: bool, device: torch.device) -> Tensor:
    return torch.full((), float(is_set), dtype=torch.float32, device=device)

"""Update of many parameters from gradients that are still scaled, without changing the gradients.

torch's fused operators divide their gradients in place, so they get copies. On the CPU the copies are pieces that stay
in the cache, which takes no additional passes over memory. The CPU library and Triton's kernels read the gradients
directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from impl.kernels._by_dtype import changes_in_turn
from impl.kernels._decorators import no_grad_fast
from impl.kernels._dispatch import cpu_library, dispatch_for
from impl.kernels._lists import HALVES
from impl.kernels._native.fused_step import fused_step
from impl.kernels._native.memory import TensorList
from impl.kernels._parameters import LONGEST_RUN, LargeParam, Parameters, SmallParamBatch, flat, piece_width
from impl.kernels._storage_order import match_layout
from impl.kernels.rules import Rule


class UpdateBackend(NamedTuple):
    """The backend that has done an update, and the reason for a slower one than the fastest of the device."""

    name: Literal["triton", "native", "cpu_blocked", "torch"]
    reason: str = ""


_TRITON, NATIVE = UpdateBackend("triton"), UpdateBackend("native")
_NO_LIBRARY = UpdateBackend("cpu_blocked", "the CPU library was not built, or not requested")
_NOT_IN_LIBRARY = UpdateBackend(
    "cpu_blocked", "the CPU library does not support the memory layout or the dtypes"
)
_NOT_IN_TRITON = "Triton's kernels do not support the memory layout, or float64 parameters"
_UNKNOWN_FLAG = "only the device knows whether the step is taken"


@no_grad_fast
def fused_step_(
    rule: Rule,
    parameters: Parameters,
    grads: TensorList,
    factor: Tensor,
    found_inf: Tensor | None = None,
) -> UpdateBackend:
    """Update parameters and states by `rule` from gradients times `factor`.

    Args:
        rule: the optimizer's arithmetic and settings.
        parameters: written, except the step counters, which already count this update. Narrow states are computed in
            f32 and rounded once, after the parameter was computed from them.
        grads: one for each parameter, of its shape and any floating-point dtype. They are not changed. For parameters
            in f16 and bf16 they are multiplied in f32 and not rounded again, for others in the parameter's dtype. If
            their layout is known, it is that of their parameters, whose addresses have not changed since
            `refresh_addresses` was called.
        factor: f32 or f64, 0-dim, on the parameters' device.
        found_inf: f32, 0-dim, on the same device. If it is 1.0, nothing is changed. None means that it is known to be
            0.0.

    Returns:
        The backend that has done the update.
    Sync: none. Collectives: none.
    """
    dispatch = dispatch_for(TensorList([parameters.params[0], *grads.representatives]))
    if dispatch.backend == "triton":
        from impl.kernels._triton.fused_step import launch_fused_step  # noqa: PLC0415  optional, and slow to import

        if launch_fused_step(rule, parameters, grads, factor, found_inf):
            return _TRITON
    if dispatch.backend == "cpu_blocked" and found_inf is None:
        library = cpu_library()
        if library is not None and fused_step(library, rule, parameters.memory, grads, factor):
            parameters.count_write()
            return NATIVE
        _step_cpu_blocked(rule, parameters, grads.tensors, factor)
        return _NO_LIBRARY if library is None else _NOT_IN_LIBRARY
    if changes_in_turn(parameters.written(), dispatch):
        for index, grad in enumerate(grads.tensors):
            _step_by_torch(rule, parameters.at(index), [grad], factor, found_inf)
    else:
        _step_by_torch(rule, parameters, grads.tensors, factor, found_inf)
    if dispatch.backend == "torch":
        return UpdateBackend("torch", dispatch.reason)
    return UpdateBackend("torch", _NOT_IN_TRITON if dispatch.backend == "triton" else _UNKNOWN_FLAG)


def _step_by_torch(
    rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None
) -> None:
    dtype = parameters.params[0].dtype
    scaled, divisor = _scaled_for(dtype, list(map(match_layout, parameters.params, grads)), factor)
    rule.apply_(parameters.params, scaled, parameters.states, parameters.steps, divisor, found_inf)
    if parameters.low_precision_params:
        torch._foreach_copy_([*parameters.low_precision_params], [*parameters.params])


def _scaled_for(
    dtype: torch.dtype, grads: Sequence[Tensor], factor: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Return copies of the gradients, and the divisor that is left for the operator."""
    if dtype in HALVES:
        return [grad.to(dtype, copy=True) for grad in grads], factor.float().reciprocal()
    return list(torch._foreach_mul([grad.to(dtype) for grad in grads], factor.to(dtype))), None


def _step_cpu_blocked(rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor) -> None:
    scaling = _Scaling.by(factor, parameters.params[0].dtype)
    for item in parameters.work_items():
        if isinstance(item, SmallParamBatch):
            _step_batch(rule, item, grads, scaling)
        else:
            grad = flat(match_layout(parameters.params[item.index], grads[item.index]))
            _step_large_param(rule, item, grad, scaling)


@dataclass(frozen=True)
class _Scaling:
    """Multiplication of gradients by a factor into a scratch buffer."""

    factor: Tensor
    # Set for halves, which the operator itself divides in f32.
    divisor: Tensor | None
    scratch: Tensor

    @classmethod
    def by(cls, factor: Tensor, dtype: torch.dtype) -> _Scaling:
        scratch = torch.empty(max(LONGEST_RUN, piece_width()), dtype=dtype, device="cpu")
        return cls(factor, factor.float().reciprocal() if dtype in HALVES else None, scratch)

    def scaled(self, flat: Tensor) -> Tensor:
        """Return the scaled gradient in the scratch buffer, which the next call overwrites."""
        scaled = self.scratch[: flat.numel()]
        if self.divisor is not None:
            return scaled.copy_(flat)
        if scaled.dtype is flat.dtype:
            return torch.mul(flat, self.factor, out=scaled)
        return scaled.copy_(flat).mul_(self.factor)


def _step_batch(rule: Rule, batch: SmallParamBatch, grads: Sequence[Tensor], scaling: _Scaling) -> None:
    scaled = scaling.scaled(_flatten_dense_tensors([grads[i] for i in batch.indices]))
    pieces = torch.split_with_sizes(scaled, batch.numels)
    rule.apply_(batch.params, pieces, batch.states, batch.steps, scaling.divisor)
    if batch.low_precision_params:
        torch._foreach_copy_(batch.low_precision_params, batch.params)


def _step_large_param(rule: Rule, large: LargeParam, grad: Tensor, scaling: _Scaling) -> None:
    for piece in large.pieces:
        scaled = scaling.scaled(grad[piece.start : piece.stop])
        rule.apply_([piece.param], [scaled], piece.states, large.steps, scaling.divisor)
        if piece.copy is not None:
            piece.copy.copy_(piece.param)

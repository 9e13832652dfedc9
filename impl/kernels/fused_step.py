"""One update of many parameters from gradients that are still scaled; the gradients are read and left as they are.

torch's fused operators divide the gradients they are given, in place. Here they are given copies: on the CPU of one
piece after the other, each small enough to stay in the cache, so that memory is read and written no more often. The CPU
library and Triton's kernels read the gradients where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from impl.kernels._dispatch import cpu_library, dispatch_for, one_of_each_kind
from impl.kernels._lists import HALVES
from impl.kernels._native.fused_step import fused_step
from impl.kernels._no_grad_fast import no_grad_fast
from impl.kernels._parameters import LONGEST_RUN, Long, Parameters, Run, flat, piece_width
from impl.kernels._storage_order import laid_out_as
from impl.kernels.rules import Rule


@no_grad_fast
def fused_step_(
    rule: Rule,
    parameters: Parameters,
    grads: Sequence[Tensor],
    factor: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and states by `rule` from gradients times `factor`.

    Args:
        rule: the optimizer's arithmetic and settings.
        parameters: overwritten, but for the counters, which stand at this update already.
        grads: one for each parameter and of its shape, of any floating dtype; left as they are. For parameters in
            f16 and bf16 they are multiplied in f32 and not rounded again, for others in the parameter's dtype. Those
            that are `KnownLayoutList` lie in memory as their parameters do, which have not moved since `have_moved` was
            asked.
        factor: f32 or f64, 0-dim, on the parameters' device.
        found_inf: f32, 0-dim, there too; where it is 1.0 nothing is changed. None: it is known to be 0.0.

    Sync: none. Collectives: none.
    """
    backend = dispatch_for([parameters.params[0], *one_of_each_kind(grads)]).backend
    if backend == "triton":
        from impl.kernels._triton.fused_step import launch_fused_step  # noqa: PLC0415  optional, and slow to import

        if launch_fused_step(rule, parameters, grads, factor, found_inf):
            return
    if backend == "cpu_blocked" and found_inf is None:
        library = cpu_library()
        if library is None or not fused_step(library, rule, parameters.memory, grads, factor):
            _step_cpu_blocked(rule, parameters, grads, factor)
    else:
        _step_by_torch(rule, parameters, grads, factor, found_inf)


def _step_by_torch(
    rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None
) -> None:
    own = parameters.params[0].dtype
    scaled, divisor = _scaled_for(own, list(map(laid_out_as, parameters.params, grads)), factor)
    rule.apply_(parameters.params, scaled, parameters.states, parameters.steps, divisor, found_inf)
    if parameters.low_precision_params:
        torch._foreach_copy_([*parameters.low_precision_params], [*parameters.params])


def _scaled_for(
    own: torch.dtype, grads: Sequence[Tensor], factor: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Copies of the gradients, and by what the operator has still to divide them."""
    if own in HALVES:
        return [grad.to(own, copy=True) for grad in grads], factor.float().reciprocal()
    return list(torch._foreach_mul([grad.to(own) for grad in grads], factor.to(own))), None


def _step_cpu_blocked(rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor) -> None:
    scaling = _Scaling.by(factor, parameters.params[0].dtype)
    for part in parameters.parts():
        if isinstance(part, Run):
            _step_run(rule, part, grads, scaling)
        else:
            grad = flat(laid_out_as(parameters.params[part.place], grads[part.place]))
            _step_long(rule, part, grad, scaling)


@dataclass(frozen=True)
class _Scaling:
    """Gradients times a factor, in memory that is used again and again."""

    factor: Tensor
    divisor: Tensor | None  # for halves, which the operator multiplies in f32; it writes what it divides
    scratch: Tensor

    @classmethod
    def by(cls, factor: Tensor, dtype: torch.dtype) -> _Scaling:
        scratch = torch.empty(max(LONGEST_RUN, piece_width()), dtype=dtype, device="cpu")
        return cls(factor, factor.float().reciprocal() if dtype in HALVES else None, scratch)

    def of(self, flat: Tensor) -> Tensor:
        """The next call overwrites it."""
        scaled = self.scratch[: flat.numel()]
        if self.divisor is not None:
            return scaled.copy_(flat)
        if scaled.dtype is flat.dtype:
            return torch.mul(flat, self.factor, out=scaled)
        return scaled.copy_(flat).mul_(self.factor)


def _step_run(rule: Rule, run: Run, grads: Sequence[Tensor], scaling: _Scaling) -> None:
    scaled = scaling.of(_flatten_dense_tensors([grads[i] for i in run.places]))
    pieces = torch.split_with_sizes(scaled, run.numels)
    rule.apply_(run.params, pieces, run.states, run.steps, scaling.divisor)
    if run.low_precision_params:
        torch._foreach_copy_(run.low_precision_params, run.params)


def _step_long(rule: Rule, long: Long, grad: Tensor, scaling: _Scaling) -> None:
    for piece in long.pieces:
        scaled = scaling.of(grad[piece.start : piece.stop])
        rule.apply_([piece.param], [scaled], piece.states, long.steps, scaling.divisor)
        if piece.copy is not None:
            piece.copy.copy_(piece.param)

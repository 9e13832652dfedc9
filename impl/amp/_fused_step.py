"""A whole mixed-precision step: the norm of scaled gradients, then one update from them.

Two updates
    A fused update reads the scaled gradients in place. Clip factor and inverse scale are one number of that update. For
    other optimizers, and for gradients that no fused update supports (sparse ones, some tensor subclasses), the
    gradients are unscaled and clipped in place, as by `unscale_` and `clip_grad_norm_`.

Whether a step is taken
    On the CPU the host reads the flag and does not call the optimizer for a skipped step. On other devices the
    optimizer is always called and the flag on the device decides: in the fused update, in an optimizer that reads
    `found_inf` itself, or by restoring what the step has changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from impl import kernels
from impl.amp._conditional_step import step_unless_found_inf
from impl.amp._gradients import coalesced, grads_from_copies
from impl.amp._opt_state import FoundInf, FusedStepResult, KeptResults, OptimizerState
from impl.kernels import StepNumbers, TensorList, concat, dtypes_of, to_device
from impl.nn.utils._clip_routes import route_for
from impl.nn.utils._dtensors import local_value
from impl.nn.utils.clip_grad import get_total_norm
from impl.optim._fused_updates import NoFusedUpdate, Served, served_by_optimizer, step_by, updates_of
from impl.optim._list_cache import same
from impl.optim._optimizers import params_of
from impl.optim._param_norms import ParamNorms, UpdateMeter, UpdateNorms
from impl.optim._shards import (
    UNSHARDED,
    Norms,
    Sharding,
    local_part,
    local_parts,
    redistribute_like,
    shardings_of,
)
from impl.optim._step_checks import check_step
from impl.optim._updates_ahead import UpdatesAhead, check_closed

_Optimizer = torch.optim.Optimizer


class Scaler(Protocol):
    """The methods of a scaler, for one process or for many, that a fused step uses."""

    _enabled: bool
    _unscales_fp16: bool
    _has_peers: bool
    _per_optimizer_states: dict[int, OptimizerState]
    _check_results: KeptResults

    def unscale_(self, optimizer: _Optimizer) -> None: ...
    def step(self, optimizer: _Optimizer) -> float | None: ...
    def _agree(self, norms: Norms, found_inf_per_device: FoundInf) -> tuple[Tensor, FoundInf]: ...
    def _norm_device(self, params: Sequence[Tensor]) -> torch.device: ...
    def _init_and_get_scale(self, funcname: str, optimizer: _Optimizer) -> tuple[Tensor, Tensor]: ...
    def _unscale_locally_(self, optimizer: _Optimizer, scale: Tensor) -> FoundInf: ...
    def _found_inf_per_device(self, optimizer: _Optimizer) -> FoundInf: ...
    def _found_inf_of_accumulated(
        self, optimizer: _Optimizer, found_inf_per_device: FoundInf
    ) -> FoundInf: ...
    def _scale_of_accumulated(self, optimizer: _Optimizer, scale: Tensor, call: str) -> Tensor: ...


@dataclass(frozen=True)
class FusedStepOptions:
    """Options of a fused step.

    Raises:
        ValueError: a number would overwrite every parameter with nan.
    """

    max_norm: float
    norm_type: float
    low_precision_params: Sequence[Tensor]
    keeps_norms: bool = False  # whether the result has the norm of each parameter's gradient
    keeps_update_norms: bool = False  # whether it has those of weights and updates
    ahead: UpdatesAhead | None = None  # updates that were applied while the backward ran

    def __post_init__(self) -> None:
        if not self.max_norm > -math.inf:
            raise ValueError(
                f"max_norm is {self.max_norm}, which would overwrite every parameter; pass a number or inf"
            )
        if math.isnan(self.norm_type):
            raise ValueError("norm_type is nan; pass a number or inf")


@dataclass(frozen=True)
class NormInputs:
    """Arguments of one call, with the parameters whose gradients have one norm, of one or more optimizers."""

    scaler: Scaler
    options: FusedStepOptions
    params: list[Tensor]
    # f32, 0-dim. None if the scaler is disabled: then nothing is checked for inf and nan.
    scale: Tensor | None

    @functools.cached_property
    def shardings(self) -> list[Sharding]:
        """Sharding of each parameter. Empty if no parameter is sharded."""
        return shardings_of(self.params)

    @functools.cached_property
    def sharding_of(self) -> dict[int, Sharding]:
        """Sharding of each parameter, by `id`. Empty if no parameter is sharded."""
        return dict(zip(map(id, self.params), self.shardings, strict=False))

    @property
    def has_peers(self) -> bool:
        """Whether other ranks take part in this step, which may have gradients if this one has none."""
        return bool(self.shardings) or (self.scaler._has_peers and self.scale is not None)

    @property
    def norm_device(self) -> torch.device:
        """Device on which the norms and flags of all gradients are combined."""
        return self.scaler._norm_device(self.params)

    @functools.cached_property
    def norm_dtype(self) -> torch.dtype | None:
        # Low-precision gradients update wide masters, so take their norm in the masters' dtype.
        has_copies = bool(self.options.low_precision_params)
        return functools.reduce(torch.promote_types, {p.dtype for p in self.params}) if has_copies else None

    @functools.cached_property
    def param_norms(self) -> ParamNorms | None:
        """Norms of single gradients, or None if they are not kept."""
        options = self.options
        return ParamNorms(self.params, options.norm_type, self.norm_device) if options.keeps_norms else None


@dataclass(frozen=True)
class Step(NormInputs):
    """Inputs of one optimizer's step."""

    optimizer: _Optimizer
    # Flags of an earlier check that has unscaled the gradients.
    known_found_inf: FoundInf | None

    @functools.cached_property
    def update_meter(self) -> UpdateMeter | None:
        """Norms of single weights and updates, or None if they are not kept."""
        return UpdateMeter(self.params, self.norm_device) if self.options.keeps_update_norms else None

    def measuring_updates(self) -> AbstractContextManager[None]:
        """Context manager around the optimizer's own step that keeps the norms of updates, if they are requested."""
        if self.update_meter is None:
            return nullcontext()
        params = [param for param in self.params if param.grad is not None]
        return self.update_meter.measuring(params, local_parts(params))

    def update_norms(self) -> UpdateNorms | None:
        return None if self.update_meter is None else self.update_meter.norms(self.shardings)


# Dynamo would replay the optimizer's work in `step_by` as it was in the traced step.
@kernels.dynamo_disable
@kernels.no_grad_fast
def fused_step(
    scaler: Scaler,
    optimizer: _Optimizer,
    options: FusedStepOptions,
    scale: Tensor | None,
    known_found_inf: FoundInf | None,
) -> FusedStepResult:
    """Step `optimizer` with unscaled and clipped gradients, unless they hold inf or nan. `Step` has the arguments.

    Raises:
        AssertionError: there are no gradients on any rank. Nothing was changed.
        RuntimeError: `overlapped_step` of the optimizer has not ended.
    """
    check_closed(optimizer)
    params = params_of(optimizer)
    step = Step(scaler, options, params, scale, optimizer, known_found_inf)
    copies = dict(zip(map(id, params), options.low_precision_params, strict=False))
    if options.ahead is not None and known_found_inf is not None:
        options.ahead.undo()  # the updates and squares are those of scaled gradients
    name = type(optimizer).__name__
    with kernels.span("GradScaler.fused_step", name), grads_from_copies(params, options.low_precision_params):
        try:
            with updates_of(optimizer, copies) as updates:
                grads_of = [(update.params, update.grads) for update in updates]
                are_scaled = scale is not None and known_found_inf is None
                joint = _joint_norm_and_found_inf(step, grads_of, are_scaled)
                norm, norms, local_found_inf, global_found_inf, numbers = joint
                found_inf: bool | None = None
                if numbers is not None:
                    norm, factor = numbers.norm, numbers.factor
                    flag, taken = numbers.found_inf, numbers.taken
                else:
                    inv_scale = kernels.inverse(scale) if scale is not None and are_scaled else None
                    if inv_scale is not None and options.norm_type != 0:
                        norm = (norm * to_device(inv_scale, norm.device)).to(norm.dtype)
                    factor = grad_factor(options, norm, inv_scale)
                    flag = None if scale is None else combine_found_inf(global_found_inf, step.norm_device)
                    found_inf = False if flag is None else kernels.flag_if_free_to_read(flag)
                    taken = None
                served: list[Served] = []
                if not found_inf:
                    unknown = flag if found_inf is None else None
                    served = step_by(
                        optimizer, updates, factor, unknown, taken, options.ahead, step.update_meter
                    )
                return FusedStepResult(
                    norm=norm,
                    norms=norms,
                    local_found_inf=local_found_inf,
                    global_found_inf=global_found_inf,
                    taken=None if found_inf is None else not found_inf,
                    served=served,
                    update_norms=step.update_norms(),
                )
        except NoFusedUpdate as error:
            check_peers(step, error)
            _check_has_gradients(step)
            served = served_by_optimizer(params, error)
        return _step_by_optimizer(step, served)


def check_peers(step: Step, error: NoFusedUpdate) -> None:
    """Raise RuntimeError if other ranks may take a fused update and wait for this one, which has none."""
    if step.has_peers and error.is_of_this_rank:
        raise RuntimeError(
            f"no fused step of this optimizer on this rank, since {error}; call unscale_, clip_grad_norm_, step and "
            "update instead, on all ranks"
        ) from None


def _check_has_gradients(step: Step) -> None:
    """Raise AssertionError if there are no gradients. Peers may have some, and `microbatch` may have left them out."""
    if not step.has_peers and all(param.grad is None for param in step.params):
        _check_recorded(step, step.scaler._found_inf_of_accumulated(step.optimizer, {}))


def _check_recorded(step: Step, found_inf: FoundInf) -> None:
    """Raise AssertionError if the gradients are scaled and no rank has checked any."""
    if step.scale is not None and not found_inf:
        check_step(step.optimizer)
        raise AssertionError("No inf checks were recorded for this optimizer.")


def _step_by_optimizer(step: Step, served: Sequence[Served]) -> FusedStepResult:
    """Unscale and clip the gradients in place, then call `optimizer.step()`."""
    scaler, optimizer, options = step.scaler, step.optimizer, step.options
    if options.ahead is not None:
        options.ahead.undo()
    with _upcast_grads(step.params, options.low_precision_params):
        if step.scale is not None and step.known_found_inf is None:
            scaler.unscale_(optimizer)
        params_and_grads = [(param, coalesced(param)) for param in step.params if param.grad is not None]
        if step.shardings:
            params = [param for param, _ in params_and_grads]
            # Each element counts once over the ranks of its parameter's sharding.
            local_grads = TensorList(
                [local_part(redistribute_like(grad, param)) for param, grad in params_and_grads]
            )
            joint = _joint_norm_and_found_inf(step, [(params, local_grads)], are_scaled=False)
            norm, norms, _, global_found_inf, _ = joint
            if step.scale is not None:
                scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = global_found_inf
        else:
            dense = [(param, dense_values(grad)) for param, grad in params_and_grads]
            norm = get_total_norm([value for _, values in dense for value in values], options.norm_type)
            norms = None
            if step.param_norms is not None:
                for param, values in dense:
                    if values:
                        step.param_norms.set(param, local_part(get_total_norm(values, options.norm_type)))
                norms = step.param_norms.of_params()
        clip_(step, norm)
        with step.measuring_updates():
            taken = call_step(step)
        if options.low_precision_params and taken is not False:
            copies = [*options.low_precision_params]
            for batch in kernels.foreach_slices(copies):
                torch._foreach_copy_(copies[batch], step.params[batch])
    is_checked = step.scale is not None
    return FusedStepResult(
        norm=norm,
        norms=norms,
        local_found_inf=scaler._check_results.of(optimizer).local_found_inf or {} if is_checked else {},
        global_found_inf=scaler._found_inf_per_device(optimizer) if is_checked else {},
        taken=taken,
        served=served,
        update_norms=step.update_norms(),
    )


def clip_(step: Step, norm: Tensor) -> None:
    """Clip the gradients by their joint `norm`, if at all. Those of DTensors are clipped shard by shard.

    torch 2.11 has foreach operators that leave partial DTensors unchanged.
    """
    if step.options.max_norm == math.inf:
        return
    grads = local_parts([grad for param in step.params if (grad := param.grad) is not None])
    if grads:
        local_norm = local_value(norm)
        route_for(grads, None).scale_(step.options.max_norm, norm if local_norm is None else local_norm)


def dense_values(grad: Tensor) -> list[Tensor]:
    """Return dense tensors with the norm of `grad`: for a sparse one its values, and a zero for all other elements."""
    if not grad.is_sparse:
        return [grad] if grad.numel() else []
    values = grad._values()
    zeros = [values.new_zeros(1)] if values.numel() < grad.numel() else []
    return [values, *zeros] if values.numel() else zeros


def call_step(step: Step) -> bool | None:
    """Step the optimizer if no flag is set. Return whether it took the step, or None if the host does not know."""
    scaler, optimizer = step.scaler, step.optimizer
    if step.scale is None:
        optimizer.step()
        return True
    flag = combine_found_inf(scaler._found_inf_per_device(optimizer), step.norm_device)
    found_inf = kernels.flag_if_free_to_read(flag)
    if found_inf:
        return False
    if found_inf is False or getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.step(optimizer)
        return scaler._check_results.of(optimizer).taken
    return step_unless_found_inf(optimizer, flag)


def agree_over_shards(norms: Norms, local_found_inf: FoundInf) -> tuple[Tensor, FoundInf]:
    """Combine norm and flags over the process groups that the parameters are sharded over.

    Collectives: one all-gather for each group.
    """
    device = norms.replicated.device
    norm, flag = norms.joint(combine_found_inf(local_found_inf, device).to(torch.float64))
    assert flag is not None
    return norm, {device: flag.float()}


class _JointResult(NamedTuple):
    norm: Tensor  # norm of all processes' gradients, still scaled
    norms: list[Tensor] | None  # norms of the parameters' unscaled gradients
    local_found_inf: FoundInf  # flags of this process's gradients
    global_found_inf: FoundInf  # flags of all processes, which decide
    # Set if the kernels that take the norm computed them too, and no other process is involved.
    numbers: StepNumbers | None


def _joint_norm_and_found_inf(
    step: Step, params_and_grads: Sequence[tuple[Sequence[Tensor], TensorList]], are_scaled: bool
) -> _JointResult:
    """Return the norm and the inf/nan flags of all processes' gradients.

    Args:
        params_and_grads: lists of parameters, and of this process's local gradients.
        are_scaled: whether the gradients are scaled.
    """
    lists = grads_by_sharding(step, params_and_grads)
    local_found_inf: FoundInf = {}
    numbers = None if step.shardings else _step_numbers(step, lists[UNSHARDED])
    if numbers is not None:
        local_found_inf[step.norm_device] = numbers.found_inf
        by_sharding = {UNSHARDED: numbers.scaled_norm}
    else:
        by_sharding = {
            sharding: local_norm(step, grads, local_found_inf) for sharding, grads in lists.items()
        }
    if step.param_norms is not None:
        step.param_norms.assign(params_and_grads)
        if step.shardings:
            by_sharding = step.param_norms.vectors(by_sharding, step.shardings)
    dtype = joint_norm_dtype(step.params)
    checked = local_found_inf if step.known_found_inf is None else step.known_found_inf
    norm, global_found_inf = step.scaler._agree(Norms(step.options.norm_type, by_sharding, dtype), checked)
    global_found_inf = step.scaler._found_inf_of_accumulated(step.optimizer, global_found_inf)
    norms = None if step.param_norms is None else step.param_norms.of_params()
    if step.param_norms is not None and norm.dim():  # a vector of the norms of all ranks
        norms, norm = [*norm.unbind()], step.param_norms.joint(norm).to(dtype)
    if norms is not None and numbers is None and are_scaled:
        norms = _unscaled(step, norms)
    _check_recorded(step, global_found_inf)
    if numbers is not None and (norm is not numbers.scaled_norm or global_found_inf is not local_found_inf):
        numbers = None
    return _JointResult(norm, norms, local_found_inf, global_found_inf, numbers)


def joint_norm_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Return the same dtype on all ranks, also if a rank has no element of a parameter in double precision."""
    is_wide = not dtypes_of(params).isdisjoint((torch.float64, torch.complex128))
    return torch.float64 if is_wide else torch.float32


def grads_by_sharding(
    step: NormInputs, params_and_grads: Sequence[tuple[Sequence[Tensor], TensorList]]
) -> dict[Sharding, TensorList]:
    """Return the gradients of each sharding. The first one is that over no group."""
    if not step.shardings:
        return {UNSHARDED: concat([grads for _, grads in params_and_grads])}
    if params_and_grads and same(step.shardings, repeat(step.shardings[0])):
        all_grads = concat([grads for _, grads in params_and_grads])
        return {UNSHARDED: TensorList([]), step.shardings[0]: all_grads}
    lists: dict[Sharding, list[Tensor]] = {UNSHARDED: []}
    lists |= {sharding: [] for sharding in step.shardings}
    for params, grads in params_and_grads:
        for param, grad in zip(params, grads.tensors, strict=True):
            lists[step.sharding_of[id(param)]].append(grad)
    return {sharding: TensorList(grads) for sharding, grads in lists.items()}


def _unscaled(step: Step, norms: list[Tensor]) -> list[Tensor]:
    if step.scale is None or step.options.norm_type == 0:
        return norms
    return list(torch._foreach_mul(norms, to_device(kernels.inverse(step.scale), step.norm_device)))


def _step_numbers(step: Step, grads: TensorList) -> StepNumbers | None:
    if step.scale is None or step.known_found_inf is not None or step.scale.device != step.norm_device:
        return None
    options = step.options
    norm_T = None if step.param_norms is None or not grads.tensors else step.param_norms.room_for(grads)
    return kernels.step_numbers(
        grads, options.norm_type, step.scale, options.max_norm, step.norm_dtype, norm_T
    )


def local_norm(step: NormInputs, grads: TensorList, local_found_inf: FoundInf) -> Tensor:
    """Return the joint norm of gradients on one or more devices. Store each device's flag in `local_found_inf`."""
    norm_type, norm_device = step.options.norm_type, step.norm_device
    norms: list[Tensor] = []
    has_empty = grads.layout is None and not all(map(Tensor.numel, grads.tensors))
    nonempty = TensorList([grad for grad in grads.tensors if grad.numel()]) if has_empty else grads
    for device, batch in nonempty.by_device().items():
        # T = gradients of the batch
        norm_T = None if step.param_norms is None else step.param_norms.room_for(batch)
        known_squares = None if step.options.ahead is None else step.options.ahead.squares
        norm, flag = kernels.checked_norm(batch, norm_type, step.norm_dtype, norm_T, known_squares)
        if device in local_found_inf:
            flag = torch.maximum(local_found_inf[device], flag)
        local_found_inf[device] = flag
        norms.append(to_device(norm, norm_device))
    if has_empty:
        for device in {grad.device for grad in grads.tensors} - local_found_inf.keys():
            local_found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
    if not norms:
        return torch.full((), math.inf if norm_type < 0 else 0.0, device=norm_device)
    # Norms of order 0 are counts, so add them.
    return norms[0] if len(norms) == 1 else kernels.total_norm(TensorList(norms), norm_type or 1.0)


def combine_found_inf(found_inf_per_device: FoundInf, device: torch.device) -> Tensor:
    """Return 1.0 on `device` if any flag is set, else 0.0."""
    flags = [to_device(flag, device) for flag in found_inf_per_device.values()]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, flags)


def grad_factor(options: FusedStepOptions, norm: Tensor, inv_scale: Tensor | None) -> Tensor:
    """Return the 0-dim factor of the scaled gradients: f64 if the norm is f64, else f32."""
    wide = torch.float64 if norm.dtype is torch.float64 else torch.float32
    factor = (
        torch.ones((), device=norm.device, dtype=wide)
        if inv_scale is None
        else to_device(inv_scale, norm.device, wide)
    )
    return (
        factor * kernels.clip_coefficient(options.max_norm, norm) if options.max_norm < math.inf else factor
    )


@contextmanager
def _upcast_grads(params: Sequence[Tensor], low_precision_params: Sequence[Tensor]) -> Generator[None]:
    """Context manager that replaces the gradients of low-precision copies by ones in the parameter's dtype."""
    narrow = [(param, param.grad) for param in params if low_precision_params and param.grad is not None]
    try:
        for param, grad in narrow:
            param.grad = grad.to(param.dtype, copy=True)
        yield
    finally:
        for param, grad in narrow:
            param.grad = grad

"""A fused step of several optimizers with one norm: all of them step, or none. P = parameters of all optimizers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from impl import kernels
from impl.amp import _fused_step
from impl.amp._fused_step import FusedStepOptions, NormInputs, Scaler, Step
from impl.amp._gradients import coalesced, sorted_gradients
from impl.amp._opt_state import FoundInf, FusedStepResult, OptState, next_stage, stage_of
from impl.kernels import TensorList, to_device
from impl.nn.utils.clip_grad import get_total_norm
from impl.optim._fused_updates import (
    NoFusedUpdate,
    Served,
    Update,
    served_by_optimizer,
    step_by,
    updates_of,
)
from impl.optim._optimizers import params_of
from impl.optim._param_norms import join_norms
from impl.optim._shards import UNSHARDED, Norms, Sharding, local_part, redistribute_like
from impl.optim._step_checks import check_step
from impl.optim._updates_ahead import check_closed

_Optimizer = torch.optim.Optimizer


@dataclass
class _Part:
    """Optimizer of a joint step, with its updates."""

    step: Step
    # The optimizer itself steps from unscaled gradients if there are none.
    updates: list[Update] | None = None
    served: list[Served] = field(default_factory=list)
    local_found_inf: FoundInf = field(default_factory=dict)
    taken: bool | None = False

    @property
    def inv_scale(self) -> Tensor | None:
        """Inverse of the scale of its gradients, or None if they are not scaled."""
        step = self.step
        if step.scale is None or step.known_found_inf is not None or self.updates is None:
            return None
        return kernels.inverse(step.scale)

    def found_inf(self) -> FoundInf:
        """Return the flags of its gradients: of all processes, or of this one if they were not combined yet."""
        known = self.step.known_found_inf
        return self.local_found_inf if known is None else known

    def local_flags(self) -> FoundInf:
        """Return the flags of this process's gradients."""
        step = self.step
        if step.known_found_inf is None:
            return self.local_found_inf
        return step.scaler._check_results.of(step.optimizer).local_found_inf or {}

    def local_norms(self, joint: NormInputs) -> dict[Sharding, Tensor]:
        """Return norms of this rank's gradients by sharding, unscaled. Keep those of single gradients in `joint`."""
        order = joint.options.norm_type
        if self.updates is not None:
            lists = [(update.params, update.grads) for update in self.updates]
        else:
            values = {param: _values(param) for param in self.step.params if param.grad is not None}
            pairs = [(param, value) for param, own in values.items() for value in own]
            if not joint.shardings:
                if joint.param_norms is not None:
                    for param, own in values.items():
                        joint.param_norms.set(param, get_total_norm(own, order))
                tensors = [value for _, value in pairs]
                return {UNSHARDED: get_total_norm(tensors, order)} if tensors else {}
            lists = [([param for param, _ in pairs], TensorList([value for _, value in pairs]))]
        by_sharding = {
            sharding: _fused_step.local_norm(joint, grads, self.local_found_inf)
            for sharding, grads in _fused_step.grads_by_sharding(joint, lists).items()
        }
        if joint.param_norms is not None:
            joint.param_norms.assign(lists)
        inv_scale = self.inv_scale
        if inv_scale is not None and order != 0:
            inv_scale = to_device(inv_scale, joint.norm_device)
            by_sharding = {sharding: norm * inv_scale for sharding, norm in by_sharding.items()}
        return by_sharding

    def apply(self, norm: Tensor, found_inf: bool | None, flag: Tensor | None) -> None:
        """Update from clipped gradients, or leave them to the optimizer. `flag` decides if `found_inf` is unknown."""
        step, options = self.step, self.step.options
        self.taken = None if found_inf is None else not found_inf
        if self.updates is not None and not found_inf:
            factor = _fused_step.grad_factor(options, norm, self.inv_scale)
            unknown = flag if found_inf is None else None
            self.served = step_by(
                step.optimizer, self.updates, factor, unknown, None, None, step.update_meter
            )
        elif not found_inf:
            _fused_step.clip_(step, norm)
            with step.measuring_updates():
                self.taken = _fused_step.call_step(step)


def _values(param: Tensor) -> list[Tensor]:
    """Return this rank's tensors with the norm of a parameter's gradient, placed like the parameter."""
    grad = redistribute_like(coalesced(param), param)
    return [local_part(value) for value in _fused_step.dense_values(grad)]


@kernels.dynamo_disable
@kernels.no_grad_fast
def joint_step(scaler: Scaler, optimizers: Sequence[_Optimizer], options: FusedStepOptions) -> Tensor:
    """Step all optimizers with the norm of all their gradients, unless a gradient of any of them holds inf or nan.

    The scaler's states and results of the optimizers are those after a step.

    Returns:
        The norm.
    Raises:
        As `GradScaler.fused_step`. If a step raises, the results of the optimizers before it are recorded.
    """
    _check(optimizers, options)
    scale = None
    stages = [OptState.READY] * len(optimizers)
    if scaler._enabled:
        scale, _ = scaler._init_and_get_scale("fused_step", optimizers[0])
        stages = [stage_of(scaler._per_optimizer_states, optimizer) for optimizer in optimizers]
    stepped = [next_stage(stage, "step") for stage in stages]
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    with ExitStack() as stack:
        stack.enter_context(kernels.span("GradScaler.fused_step", names))
        joint = NormInputs(scaler, options, params_of(*optimizers), scale)
        parts = [
            _new_part(joint, optimizer, stage is OptState.UNSCALED, stack)
            for optimizer, stage in zip(optimizers, stages, strict=True)
        ]
        _unscale(scaler, parts)
        norm, norms, global_found_inf = _joint_norm(joint, parts)
        flag = None if scale is None else _fused_step.combine_found_inf(global_found_inf, joint.norm_device)
        found_inf = False if flag is None else kernels.flag_if_free_to_read(flag)
        if scale is not None:
            _record_checks(scaler, parts, global_found_inf)
        for part, own_norms, stage in zip(parts, norms, stepped, strict=True):
            local_found_inf = part.local_flags()
            part.apply(norm, found_inf, flag)
            result = FusedStepResult(
                norm=norm,
                norms=own_norms,
                local_found_inf=local_found_inf,
                global_found_inf=global_found_inf,
                taken=part.taken,
                served=part.served,
                update_norms=part.step.update_norms(),
            )
            check_results = scaler._check_results.of(part.step.optimizer)
            if scale is None:
                check_results.record_backends_and_norms(result, options.norm_type)
                continue
            scaler._per_optimizer_states[id(part.step.optimizer)].update(
                stage=stage, found_inf_per_device=global_found_inf
            )
            check_results.record_fused_step(result, (), options.norm_type)
    return norm


def _unscale(scaler: Scaler, parts: Sequence[_Part]) -> None:
    """Unscale the scaled gradients of optimizers that step themselves. If one optimizer's are invalid, change none."""
    scaled = [
        (part, part.step.scale)
        for part in parts
        if part.updates is None and part.step.scale is not None and part.step.known_found_inf is None
    ]
    for part, _ in scaled[1:]:
        sorted_gradients(part.step.optimizer, scaler._unscales_fp16)
    for part, scale in scaled:
        part.local_found_inf = scaler._unscale_locally_(part.step.optimizer, scale)


def _record_checks(scaler: Scaler, parts: Sequence[_Part], global_found_inf: FoundInf) -> None:
    """Record that gradients are unscaled, for the steps of these optimizers, and in case one of them raises."""
    for part in parts:
        if part.updates is None:
            optimizer = part.step.optimizer
            check_results = scaler._check_results.of(optimizer)
            check_results.local_found_inf = part.local_flags()
            check_results.global_found_inf = global_found_inf
            scaler._per_optimizer_states[id(optimizer)].update(
                stage=OptState.UNSCALED, found_inf_per_device=global_found_inf
            )


def _check(optimizers: Sequence[_Optimizer], options: FusedStepOptions) -> None:
    if not optimizers:
        raise ValueError("fused_step() got no optimizer; pass one, or a list of optimizers to step together")
    if options.low_precision_params:
        raise ValueError(
            f"low_precision_params are copies of one optimizer's parameters, and there are {len(optimizers)} "
            "optimizers; call fused_step(optimizer) for each, without a common norm"
        )
    params = params_of(*optimizers)
    repeated = [tuple(param.shape) for param, count in Counter(params).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} parameters, the first of shape {repeated[0]}, belong to several of the optimizers, and "
            "their gradients would count several times; give each parameter to one of them"
        )
    for optimizer in optimizers:
        check_closed(optimizer)


def _new_part(joint: NormInputs, optimizer: _Optimizer, is_unscaled: bool, stack: ExitStack) -> _Part:
    scaler, scale, params = joint.scaler, joint.scale, params_of(optimizer)
    known = scaler._found_inf_per_device(optimizer) if is_unscaled else None
    own_scale = None if scale is None else scaler._scale_of_accumulated(optimizer, scale, "fused_step")
    part = _Part(Step(scaler, joint.options, params, own_scale, optimizer, known))
    try:
        part.updates = stack.enter_context(updates_of(optimizer, {}))
    except NoFusedUpdate as error:
        _fused_step.check_peers(part.step, error)
        part.served = served_by_optimizer(params, error)
    return part


def _joint_norm(
    joint: NormInputs, parts: Sequence[_Part]
) -> tuple[Tensor, list[list[Tensor] | None], FoundInf]:
    """Return the norm of all gradients, the norms of each part's single gradients if kept, and the joint flags."""
    order, device, scaler = joint.options.norm_type, joint.norm_device, joint.scaler
    local: dict[Sharding, list[Tensor]] = {UNSHARDED: []} | {sharding: [] for sharding in joint.shardings}
    checked: FoundInf = {}
    for part in parts:
        for sharding, norm in part.local_norms(joint).items():
            local[sharding].append(to_device(norm, device, torch.float64))
        for flag_device, flag in part.found_inf().items():
            other = checked.get(flag_device)
            checked[flag_device] = flag if other is None else torch.maximum(other, flag.reshape(other.shape))
    empty_norm = torch.full((), math.inf if order < 0 else 0.0, dtype=torch.float64, device=device)
    by_sharding = {
        sharding: join_norms(torch.stack([*norms, empty_norm]), order) for sharding, norms in local.items()
    }
    inv_scale_P = None
    if joint.param_norms is not None:
        inv_scale_P = torch.cat([_inv_scales(part, device) for part in parts])
        if joint.shardings:
            vectors = joint.param_norms.vectors(by_sharding, joint.shardings)
            by_sharding = {sharding: norm_P * inv_scale_P for sharding, norm_P in vectors.items()}
    dtype = _fused_step.joint_norm_dtype(joint.params)
    norm, found_inf = scaler._agree(Norms(order, by_sharding, dtype), checked)
    for part in parts:
        found_inf = scaler._found_inf_of_accumulated(part.step.optimizer, found_inf)
    if joint.scale is not None and not found_inf:
        for part in parts:
            check_step(part.step.optimizer)
        raise AssertionError("No inf checks were recorded for these optimizers.")
    if joint.param_norms is None:
        return norm.to(dtype), [None] * len(parts), found_inf
    assert inv_scale_P is not None
    norm_P = norm if norm.dim() else torch.stack(joint.param_norms.of_params()) * inv_scale_P
    split = norm_P.split([len(part.step.params) for part in parts])
    joint_norm = join_norms(norm, order) if norm.dim() else norm
    return joint_norm.to(dtype), [[*own_P.unbind()] for own_P in split], found_inf


def _inv_scales(part: _Part, device: torch.device) -> Tensor:
    """Return the factor of the norms of each of the part's parameters: f64."""
    inv_scale, count = part.inv_scale, len(part.step.params)
    if inv_scale is None or part.step.options.norm_type == 0:
        return torch.ones(count, dtype=torch.float64, device=device)
    return to_device(inv_scale, device, torch.float64).expand(count)

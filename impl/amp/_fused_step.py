"""A whole mixed-precision step: the norm of scaled gradients, then one update from them.

Two updates
    An optimizer that has a fused update reads its gradients where they are, scaled; the clip factor, times one over the
    scale, is one number in that update. Every other optimizer, and gradients that no fused update takes (sparse ones,
    some tensor subclasses), get them unscaled and clipped in place, as by `unscale_` and `clip_grad_norm_`.

Whether a step is taken
    On the CPU the host looks, and does not call the optimizer for a step that is skipped. Elsewhere the optimizer is
    always called, and the flag on the device decides: in the fused update, in an optimizer that takes `found_inf`
    itself, or by putting back what the step has changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl import kernels
from impl.amp._conditional_step import step_unless
from impl.amp._gradients import borrowed_grads, coalesced
from impl.amp._opt_state import Found, KeptResults, OptimizerState
from impl.kernels import KnownLayoutList, StepNumbers, joined, placed
from impl.nn.utils.clip_grad import clip_grads_with_norm_, get_total_norm
from impl.optim._fused_updates import NoFusedUpdate, step_by, updates_of
from impl.optim._shards import Norms, local_part, shard_group, shard_groups

_Optimizer = torch.optim.Optimizer


class Scaler(Protocol):
    """What a fused step asks of its scaler, which answers for one process or for many."""

    _has_peers: bool
    _per_optimizer_states: dict[int, OptimizerState]
    _check_results: KeptResults

    def unscale_(self, optimizer: _Optimizer) -> None: ...
    def step(self, optimizer: _Optimizer) -> float | None: ...
    def _agree(self, norms: Norms, found_inf_per_device: Found) -> tuple[Tensor, Found]: ...
    def _place_of_norms(self, params: Sequence[Tensor]) -> torch.device: ...
    def _found_inf_per_device(self, optimizer: _Optimizer) -> Found: ...


@dataclass(frozen=True)
class FusedStepOptions:
    """What a fused step is asked for.

    Raises:
        ValueError: a number that would ruin the parameters.
    """

    max_norm: float
    norm_type: float
    low_precision_params: Sequence[Tensor]

    def __post_init__(self) -> None:
        if not self.max_norm > -math.inf:
            raise ValueError(
                f"max_norm is {self.max_norm}, which would overwrite every parameter; pass a number or inf"
            )
        if math.isnan(self.norm_type):
            raise ValueError("norm_type is nan, which is the order of no norm; pass a number or inf")


@dataclass(frozen=True)
class FusedStepResult:
    """What a fused step found and did."""

    norm: Tensor  # of the unscaled gradients
    here: Found  # in this process's gradients
    found: Found  # by all processes: what decides
    taken: bool | None  # None: the host does not know


@dataclass(frozen=True)
class _Step:
    """One call, and what it needs of the scaler."""

    scaler: Scaler
    optimizer: _Optimizer
    options: FusedStepOptions
    params: list[Tensor]
    scale: Tensor | None  # f32, 0-dim; None of a scaler that is switched off: nothing is looked for
    known: Found | None  # what a check found already that has unscaled the gradients

    @functools.cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        return shard_groups(self.params)

    @property
    def home(self) -> torch.device:
        """Where numbers about all gradients meet."""
        return self.scaler._place_of_norms(self.params)

    @functools.cached_property
    def norm_dtype(self) -> torch.dtype | None:
        # Gradients of copies are worth more than their dtype: what they change is wide.
        has_copies = bool(self.options.low_precision_params)
        return functools.reduce(torch.promote_types, {p.dtype for p in self.params}) if has_copies else None


@kernels.dynamo_disable  # Dynamo would keep, of what `step_by` has the optimizer do, that of the step it was traced in
@kernels.no_grad_fast
def fused_step(
    scaler: Scaler,
    optimizer: _Optimizer,
    options: FusedStepOptions,
    scale: Tensor | None,
    known: Found | None,
) -> FusedStepResult:
    """Step `optimizer` by gradients over `scale`, clipped, unless inf or nan is found; the arguments as in `_Step`.

    Raises:
        AssertionError: there are no gradients, here or on any rank.
        Nothing was changed then.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    step = _Step(scaler, optimizer, options, params, scale, known)
    copies = dict(zip(map(id, params), options.low_precision_params, strict=False))
    name = type(optimizer).__name__
    with kernels.span("GradScaler.fused_step", name), borrowed_grads(params, options.low_precision_params):
        try:
            with updates_of(optimizer, copies) as updates:
                agreed = _agreed(step, [(update.params, update.grads) for update in updates])
                norm, here, found, numbers = agreed
                if numbers is not None:
                    step_by(optimizer, updates, numbers.factor, numbers.found_inf, numbers.taken)
                    return FusedStepResult(numbers.norm, here, found, None)
                inv_scale = kernels.inverse(scale) if scale is not None and known is None else None
                if inv_scale is not None and options.norm_type != 0:
                    norm = (norm * placed(inv_scale, norm.device)).to(norm.dtype)
                flag = None if scale is None else joint_flag(found, step.home)
                is_bad = False if flag is None else kernels.known_on_host(flag)
                if not is_bad:
                    factor = _factor(options, norm, inv_scale)
                    step_by(optimizer, updates, factor, flag if is_bad is None else None)
                return FusedStepResult(norm, here, found, None if is_bad is None else not is_bad)
        except NoFusedUpdate as why:
            has_peers = bool(step.groups) or (scaler._has_peers and scale is not None)
            if has_peers and why.is_of_this_rank:
                # Others may have found no reason, and wait.
                raise RuntimeError(
                    f"no fused step of this optimizer on this rank, since {why}; call unscale_, clip_grad_norm_, step "
                    "and update instead, on all ranks"
                ) from None
        return _by_optimizer(step)


def _by_optimizer(step: _Step) -> FusedStepResult:
    """By the optimizer's own step, from gradients that are unscaled and clipped in place."""
    scaler, optimizer, options = step.scaler, step.optimizer, step.options
    with _widened(step.params, options.low_precision_params):
        if step.scale is not None and step.known is None:
            scaler.unscale_(optimizer)
        having = [(param, coalesced(param)) for param in step.params if param.grad is not None]
        if step.groups:
            parts = [param for param, _ in having], [local_part(grad) for _, grad in having]
            norm, _, found, _ = _agreed(step, [parts])
            if step.scale is not None:
                scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        else:
            norm = get_total_norm(
                [numbers for _, grad in having for numbers in _numbers_in(grad)], options.norm_type
            )
        if options.max_norm < math.inf:
            clip_grads_with_norm_(step.params, options.max_norm, norm)
        taken = _call_step(step)
        if options.low_precision_params and taken is not False:
            torch._foreach_copy_([*options.low_precision_params], step.params)
    if step.scale is None:
        return FusedStepResult(norm, {}, {}, taken)
    check_results = scaler._check_results.of(optimizer)
    return FusedStepResult(norm, check_results.here or {}, scaler._found_inf_per_device(optimizer), taken)


def _numbers_in(grad: Tensor) -> list[Tensor]:
    """Dense tensors that have the gradient's norm: what a sparse one holds, and one zero for all that it does not."""
    if not grad.is_sparse:
        return [grad] if grad.numel() else []
    held = grad._values()
    others = [held.new_zeros(1)] if held.numel() < grad.numel() else []
    return [held, *others] if held.numel() else others


def _call_step(step: _Step) -> bool | None:
    """Whether the optimizer took its step; None where the host does not know."""
    scaler, optimizer = step.scaler, step.optimizer
    if step.scale is None:
        optimizer.step()
        return True
    flag = joint_flag(scaler._found_inf_per_device(optimizer), step.home)
    is_bad = kernels.known_on_host(flag)
    if is_bad:
        return False
    if is_bad is False or getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.step(optimizer)
        return scaler._check_results.of(optimizer).taken
    return step_unless(optimizer, flag)


def agree_in_one_group(norms: Norms, here: Found) -> tuple[Tensor, Found]:
    """What the ranks that hold the parameters together make of it, where there is one group of them.

    Raises:
        RuntimeError: there are several.
    Collectives: one all-gather.
    """
    if len(norms.sharded) > 1:
        raise RuntimeError(
            f"the parameters are sharded over {len(norms.sharded)} process groups, none of which can decide for all; "
            "use a ShardedGradScaler, with a process_group of all their ranks"
        )
    [group] = norms.sharded
    device = norms.replicated.device
    norm, flag = norms.gathered(group, joint_flag(here, device))
    return norm, {device: flag.float()}


class _Agreed(NamedTuple):
    norm: Tensor  # of all processes' gradients, as they are
    here: Found  # in this process's gradients
    found: Found  # what decides
    numbers: StepNumbers | None  # if they were launched with the norm, and no other process has a say


def _agreed(step: _Step, parts: Sequence[tuple[Sequence[Tensor], list[Tensor]]]) -> _Agreed:
    """Take the norm and the check of this process's gradients, and agree on both with others.

    Args:
        parts: lists of parameters, and of this process's part of their gradients.
    """
    replicated: list[Tensor] = []
    sharded: dict[dist.ProcessGroup, list[Tensor]] = {group: [] for group in step.groups}
    if sharded:
        for params, grads in parts:
            for param, grad in zip(params, grads, strict=True):
                group = shard_group(param)
                (replicated if group is None else sharded[group]).append(grad)
    else:
        replicated = joined([grads for _, grads in parts])
    here: Found = {}
    numbers = None if sharded else _step_numbers(step, replicated)
    if numbers is not None:
        here[step.home] = numbers.found_inf
    norms = Norms(
        step.options.norm_type,
        _norm(step, replicated, here) if numbers is None else numbers.scaled_norm,
        {group: _norm(step, some, here) for group, some in sharded.items()},
    )
    norm, found = step.scaler._agree(norms, here if step.known is None else step.known)
    if step.scale is not None and not found:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    if numbers is not None and (norm is not numbers.scaled_norm or found is not here):
        numbers = None
    return _Agreed(norm, here, found, numbers)


def _step_numbers(step: _Step, grads: Sequence[Tensor]) -> StepNumbers | None:
    if step.scale is None or step.known is not None or step.scale.device != step.home:
        return None
    options = step.options
    return kernels.step_numbers(grads, options.norm_type, step.scale, options.max_norm, step.norm_dtype)


def _norm(step: _Step, grads: Sequence[Tensor], here: Found) -> Tensor:
    """Of gradients that may lie on several devices; what a check of them finds goes into `here`."""
    order, home = step.options.norm_type, step.home
    norms: list[Tensor] = []
    filled = (
        grads
        if isinstance(grads, KnownLayoutList) or all(map(Tensor.numel, grads))
        else [grad for grad in grads if grad.numel()]
    )
    for device, batch in _by_device(filled).items():
        norm, flag = kernels.checked_norm(batch, order, step.norm_dtype)
        here[device] = torch.maximum(here[device], flag) if device in here else flag
        norms.append(placed(norm, home))
    if len(filled) < len(grads):
        for device in {grad.device for grad in grads} - here.keys():
            here[device] = torch.zeros((), dtype=torch.float32, device=device)
    if not norms:
        return torch.full((), math.inf if order < 0 else 0.0, device=home)
    # Norms of order 0 are counts, which add up.
    return norms[0] if len(norms) == 1 else kernels.total_norm(norms, order or 1.0)


def _by_device(grads: Sequence[Tensor]) -> Mapping[torch.device, Sequence[Tensor]]:
    if isinstance(grads, KnownLayoutList) or (grads and kernels.are_on(grads[0].device, grads)):
        return {grads[0].device: grads}
    batches: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        batches.setdefault(grad.device, []).append(grad)
    return batches


def joint_flag(found: Found, home: torch.device) -> Tensor:
    """1.0 if one of the flags is, on `home`."""
    flags = [placed(flag, home) for flag in found.values()]
    return (
        functools.reduce(torch.maximum, flags) if flags else torch.zeros((), dtype=torch.float32, device=home)
    )


def _factor(options: FusedStepOptions, norm: Tensor, inv_scale: Tensor | None) -> Tensor:
    """By what a scaled gradient is multiplied, 0-dim: f64 if the norm is, else f32."""
    wide = torch.float64 if norm.dtype is torch.float64 else torch.float32
    factor = (
        torch.ones((), device=norm.device, dtype=wide)
        if inv_scale is None
        else placed(inv_scale, norm.device, wide)
    )
    return (
        factor * kernels.clip_coefficient(options.max_norm, norm) if options.max_norm < math.inf else factor
    )


@contextmanager
def _widened(params: Sequence[Tensor], low_precision_params: Sequence[Tensor]) -> Generator[None]:
    """Gradients borrowed from copies are, in here, copies in the dtype of their parameter."""
    narrow = [(param, param.grad) for param in params if low_precision_params and param.grad is not None]
    try:
        for param, grad in narrow:
            param.grad = grad.to(param.dtype, copy=True)
        yield
    finally:
        for param, grad in narrow:
            param.grad = grad

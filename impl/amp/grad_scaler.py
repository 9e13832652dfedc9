"""Gradient scaling: scale the loss up, scale the gradients back, and skip steps whose gradients overflowed."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl import kernels
from impl._names import describe_names
from impl.amp import _fused_step, _gradients, _loss_scale
from impl.amp._availability import amp_definitely_not_available, warn_of_missing_cuda
from impl.amp._aware_optimizers import amp_attributes, takes_scaler, warn_of_scaler_as_argument
from impl.amp._joint_step import joint_step
from impl.amp._loss_scale import SMALLEST_SCALE, SkipMonitor
from impl.amp._microbatch import Accumulation, Microbatch, run_microbatch
from impl.amp._opt_state import (
    CheckResults,
    FoundInf,
    KeptResults,
    OptimizerState,
    OptState,
    next_stage,
    stage_of,
)

# Pickles of torch's scalers look this name up.
from impl.amp._opt_state import refresh_per_optimizer_state as _refresh_per_optimizer_state
from impl.amp._overlapped_step import OverlappedStep
from impl.amp._step_reports import StepReports
from impl.kernels import to_device
from impl.optim._fused_updates import rule_of
from impl.optim._optimizers import check_has_param_groups, optimizers_in, params_of
from impl.optim._shards import Norms, member_groups
from impl.optim._step_checks import check_step
from impl.optim._updates_ahead import UpdatesAhead

__all__ = ["GradScaler", "OptState"]

_Optimizer = torch.optim.Optimizer


class GradScaler(StepReports):
    """Loss scaler: keeps small float16 gradients from vanishing, and skips steps whose gradients overflowed.

    One iteration is `scale(loss).backward()`, then `step(optimizer)` for each optimizer, then `update()`. To read or
    clip gradients, call `unscale_(optimizer)` before the step. After a step that found inf or nan, `update` multiplies
    the scale by `backoff_factor`. After `growth_interval` consecutive steps without, it multiplies it by
    `growth_factor`.

    If a method raises, the scaler, the gradients and the optimizer's attributes are unchanged. An error in the
    optimizer's own `step` is the exception: the gradients stay unscaled, and the scaler records that they are.

    Args:
        device: "cuda", "cpu" or another device type. "cuda" without CUDA disables the scaler, with a warning.
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: below 1.
        growth_interval: consecutive steps without inf or nan before the scale grows.
        enabled: if False, `step` only calls `optimizer.step`, `scale` returns its argument, and the rest does nothing.
        min_scale: lower bound of the scale.
        error_if_stuck: raise, instead of warning, if the scale is at `min_scale` and at least three consecutive steps
            were skipped.
        max_skipped_steps: number of consecutive skipped steps, at any scale, after which `update` raises.
    Raises:
        AssertionError: a factor is on the wrong side of 1.
        ValueError: `init_scale` or `min_scale` is not a valid scale; or `max_skipped_steps` is below 1.
    Sync: none unless the method says so. If gradients are on the host and the scale is on a device, methods that check
        or step wait for the scale and for the results of the check.
    Source: torch.amp.GradScaler 2.13; differences: `min_scale` and its warning, float16 and bfloat16 losses are scaled
        in float32, a positional closure raises like one by keyword, a loaded scale is known before the first `scale`,
        calls that raise change nothing (`load_state_dict` too), and values that would silently ruin the scale or the
        gradients raise. New: `max_skipped_steps`, `fused_step`, `explain`, `found_inf`, `step_was_taken`,
        `nonfinite_parameters`, `gradient_norms`, `update_ratios`, `microbatch`, `skipped_microbatches`,
        `overlapped_step`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(weight.sum()).backward()
    >>> weight.grad
    tensor([1024., 1024.])
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.detach(), scaler.step_was_taken(optimizer), scaler.get_scale()
    (tensor([0.5000, 0.5000]), True, 1024.0)
    """

    # Attributes that torch's scaler does not have. A scaler that torch pickled gets these values.
    _min_scale: float = SMALLEST_SCALE
    _error_if_stuck: bool = False
    _max_skipped_steps: int | None = None
    # Set by load_state_dict: the scale is known, but its tensor does not exist yet.
    _loaded: bool = False
    # Frames between these methods and the user's call, for the `stacklevel` of warnings.
    _frames_above: int = 0
    # Whether a step waits for other processes, whether or not the parameters are sharded.
    _has_peers: bool = False
    # If False, float16 gradients raise, because their unscaled values may vanish.
    _unscales_fp16: bool = False

    def __init__(  # noqa: PLR0913  torch's six
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST_SCALE,
        error_if_stuck: bool = False,
        max_skipped_steps: int | None = None,
    ) -> None:
        self._device = device
        self._enabled = enabled
        if device == "cuda" and enabled and amp_definitely_not_available():
            warn_of_missing_cuda(stacklevel=2 + self._frames_above)
            self._enabled = False
        _loss_scale.check_max_skipped_steps(max_skipped_steps)
        self._max_skipped_steps = max_skipped_steps
        self._reset_records()
        if not self._enabled:
            return
        self._min_scale = _loss_scale.check_settings(growth_factor, backoff_factor, init_scale, min_scale)
        self._error_if_stuck = error_if_stuck
        # Other libraries read and assign these, so they have torch's names. Like torch's, they only exist if the scaler
        # is enabled. `_scale` (f32) and `_growth_tracker` (i32) are 0-dim, and None until the first `scale`.
        self._init_scale = init_scale
        self._scale: Tensor | None = None
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states: dict[int, OptimizerState] = defaultdict(_refresh_per_optimizer_state)

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...
    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """Multiply a loss, or losses nested in iterables, by the scale.

        Args:
            outputs: a tensor of any shape, dtype and device, or an iterable of tensors, nested to any depth.
        Returns:
            The scaled `outputs`. Lists and tuples keep their type, other iterables become lazy iterators. Float16 and
            bfloat16 tensors become float32, because a scaled float16 loss above 65504 would be inf.
        Raises:
            ValueError: an element of `outputs` is neither a tensor nor an iterable. A string counts as neither.
        Source: torch.amp.GradScaler.scale 2.13; differences: losses of one dimension and more become float32 too (torch
            keeps their dtype).

        >>> GradScaler("cpu", init_scale=65536.0).scale([torch.tensor([2.0], dtype=torch.float16)])
        [tensor([131072.])]
        """
        if not self._enabled:
            return outputs
        was_unknown = self._scale is None
        try:
            if isinstance(outputs, Tensor):
                return _loss_scale.scale_tensor(
                    outputs, to_device(self._scale_from(outputs.device), outputs.device)
                )
            return _loss_scale.scale_nested(outputs, _loss_scale.PerDevice(self._scale_from))
        except BaseException:
            if was_unknown:
                self._scale = self._growth_tracker = None
            raise

    def unscale_(self, optimizer: _Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale in place, and check them for inf and nan.

        Call it after all gradients are accumulated, if you read or clip them before `step`. Otherwise `step` does it.
        All gradients are unscaled, even if some hold inf or nan. Sparse float16 gradients are replaced by coalesced
        ones.

        Raises:
            RuntimeError: called twice, or after `step`, since the last `update`; or elements of a gradient share
                memory.
            AssertionError: no scale exists yet, because neither `scale` nor `load_state_dict` was called.
            ValueError: a gradient is float16; or two parameters of the optimizer have the same gradient.
        Collectives: none for plain gradients. For DTensors one all-reduce for each dimension of a mesh that they are
            sharded over.
        Source: torch.amp.GradScaler.unscale_ 2.13; differences: gradients that share memory raise (torch unscales them
            twice); DTensors of several dtypes have one all-reduce.
        """
        if not self._enabled:
            return
        scale, _ = self._init_and_get_scale("unscale_", optimizer)
        unscaled = next_stage(stage_of(self._per_optimizer_states, optimizer), "unscale_")
        scale = self._scale_of_accumulated(optimizer, scale, "unscale_")
        self._record_check(optimizer, self._unscale_locally_(optimizer, scale))["stage"] = unscaled

    def step(self, optimizer: _Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` with unscaled gradients, unless one of them holds inf or nan.

        An optimizer with a true `_step_supports_amp_scaling` is always called. It reads `grad_scale` (f32, 0-dim, or
        None after `unscale_`) and `found_inf` (f32, 0-dim) from its attributes and skips the step itself.

        Returns:
            The result of `optimizer.step`, or None if the step was skipped. `step_was_taken` distinguishes the two.
        Raises:
            RuntimeError: a closure was passed, which would run unscaled; or called twice since the last `update`.
            AssertionError: no scale exists yet; or no parameter of the optimizer has a gradient.
        Sync: one for each device with gradients; none if the optimizer skips the step itself.
        Collectives: those of `unscale_`, unless it was called.
        Source: torch.amp.GradScaler.step 2.13; differences: the class's.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._init_and_get_scale("step", optimizer)
        stage = stage_of(self._per_optimizer_states, optimizer)
        stepped = next_stage(stage, "step")
        check_results = self._check_results.of(optimizer)
        check_results.taken = None
        if stage is OptState.READY and self._accumulation_of(optimizer) is not None:
            if takes_scaler(optimizer.step):
                raise NotImplementedError(
                    "an optimizer whose step takes grad_scaler would unscale without regard to the microbatches that "
                    "were left out; call unscale_(optimizer) before step(optimizer)"
                )
            self.unscale_(optimizer)
            stage = OptState.UNSCALED
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_if_finite(optimizer, stage, check_results, *args, **kwargs)
        elif takes_scaler(optimizer.step):
            warn_of_scaler_as_argument(stacklevel=2 + self._frames_above)
            result = cast("float | None", optimizer.step(*args, **(kwargs | {"grad_scaler": self})))
        else:
            result = self._step_with_attributes(optimizer, stage, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = stepped
        check_results.global_found_inf = check_results.step_found_inf = state["found_inf_per_device"]
        return result

    def fused_step(  # noqa: PLR0913  settings of four calls
        self,
        optimizer: _Optimizer | Sequence[_Optimizer],
        max_norm: float = math.inf,
        norm_type: float = 2.0,
        *,
        low_precision_params: Iterable[Tensor] = (),
        update: bool = True,
        keep_norms: bool = False,
        keep_update_norms: bool = False,
    ) -> Tensor:
        """Unscale, clip, step and update in one call, with two passes over memory on the CPU and CUDA.

        It gives the same result as `unscale_`, `clip_grad_norm_`, `step` and `update`. Adam, AdamW, SGD and Adagrad of
        `torch.optim` take a fused update, and `.grad` stays scaled and unclipped. For other optimizers `.grad` is
        unscaled and clipped in place, then `optimizer.step()` is called. `explain` says which, and
        `docs/fused-step.md` has the details and exceptions.

        Args:
            optimizer: the norm is taken over all its gradients. Off the CPU, its hooks and schedulers see a step even
                if it is skipped. Several optimizers in a list or tuple have one norm and one decision: all are stepped,
                in this order, or none.
            max_norm: clip the unscaled gradients to this norm; inf does not clip.
            norm_type: any float. 0 counts the gradients (or shards of gradients) that hold a non-zero element.
            low_precision_params: a copy of each parameter of the optimizer, which gets the new values in the same pass.
                A parameter without a gradient uses the gradient of its copy. Only for one optimizer.
            update: if False, the scale stays until `update()` is called after the steps of other optimizers.
            keep_norms: keep the norm of each gradient for `gradient_norms`.
            keep_update_norms: keep the norms of each parameter and its update for `update_ratios`.
        Returns:
            0-dim norm of the unscaled gradients before clipping, like `clip_grad_norm_`. It may be inf or nan if the
            step is skipped. Float32 or float64 if the parameters are sharded, or for several optimizers.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: the optimizer has stepped since the last `update`; the parameters are sharded and no fused
                update supports this rank's gradients; or see `update`.
            AssertionError: no scale exists yet; or no parameter of the optimizer has a gradient.
            ValueError: `max_norm` is nan or -inf; `norm_type` is nan; `low_precision_params` do not match the
                parameters; a float16 gradient would be unscaled in place; or the list of optimizers is empty, or two of
                them have one parameter.
        Sync: none for the four optimizers, except in the first step of momentum with `dampening`, and none for
            optimizers that read `found_inf` themselves. For others see `docs/fused-step.md`.
        Collectives: one all-gather of a few numbers for each process group that parameters are sharded over (FSDP,
            DTensors on any meshes). With `keep_norms`, of a number for each parameter. Without a fused update,
            gradients whose placements differ from those of their parameters are redistributed first, for the norm.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> scaler.fused_step(optimizer, max_norm=1.0)
        tensor(5.)
        >>> weight.detach()
        tensor([0.7000, 0.6000])
        """
        optimizers = optimizers_in(optimizer)
        options = _fused_step.FusedStepOptions(
            float(max_norm),
            float(norm_type),
            tuple(low_precision_params),
            keep_norms,
            keep_update_norms,
        )
        if len(optimizers) != 1:
            norm = joint_step(self, optimizers, options)
            if update:
                self.update()
            return norm
        return self._single_step(optimizers[0], options, update=update)

    def _single_step(
        self, optimizer: _Optimizer, options: _fused_step.FusedStepOptions, *, update: bool
    ) -> Tensor:
        if not self._enabled:
            step_result = _fused_step.fused_step(self, optimizer, options, scale=None, known_found_inf=None)
            self._check_results.of(optimizer).record_backends_and_norms(step_result, options.norm_type)
            return step_result.norm
        scale, _ = self._init_and_get_scale("fused_step", optimizer)
        stage = stage_of(self._per_optimizer_states, optimizer)
        stepped = next_stage(stage, "step")
        if options.low_precision_params and self._accumulation_of(optimizer) is not None:
            raise ValueError(
                "low_precision_params have gradients that microbatch() has not checked; accumulate the gradients of "
                "the optimizer's own parameters, or use no microbatch()"
            )
        scale = self._scale_of_accumulated(optimizer, scale, "fused_step")
        known_found_inf = self._found_inf_per_device(optimizer) if stage is OptState.UNSCALED else None
        step_result = _fused_step.fused_step(self, optimizer, options, scale, known_found_inf)
        self._per_optimizer_states[id(optimizer)].update(
            stage=stepped, found_inf_per_device=step_result.global_found_inf
        )
        check_results = self._check_results.of(optimizer)
        check_results.record_fused_step(step_result, options.low_precision_params, options.norm_type)
        if update:
            self.update()
        return step_result.norm

    @contextmanager
    def overlapped_step(
        self,
        optimizer: _Optimizer,
        max_norm: float = math.inf,
        *,
        update: bool = True,
        cast_params: bool = False,
    ) -> Generator[OverlappedStep]:
        """Context manager around a backward, which calls `fused_step` at its end and updates during the backward.

        Parameters that FSDP keeps on the host (`CPUOffload`, `CPUOffloadPolicy`) are updated unit by unit, as their
        gradients arrive, while the device computes the gradients of earlier units. The result is that of `fused_step`
        to the bit: an update assumes that the gradients need no clipping and hold no inf or nan. If that turns out to
        be wrong, it is repeated from a copy of the earlier values, or undone. The copy takes as much memory as the
        parameters and the optimizer's states. `docs/fused-step.md` has the details and costs.

        Run the last backward of an iteration inside. After it, only call the model or `unscale_` in the region. Other
        reads of sharded parameters (`state_dict`, a penalty on weights in the loss) may get updated values. Other
        writes to parameters or gradients may be ignored. If an exception leaves the region, the parameters and states
        are as before, and no step is taken.

        Args:
            optimizer, max_norm, update: as for `fused_step`.
            cast_params: also store parameters that are updated early in the dtype that FSDP gathers them in. The next
                iteration copies these casts to the device instead of the shards, half the bytes for bfloat16 instead of
                float32. It misses writes to shards that change no version counter (`.data`, foreach operators on
                DTensors).
        Returns:
            An object that has the norm, and the numbers of elements that were updated early, after the region.
        Raises:
            RuntimeError: the region is inside of another one for the same parameters; the optimizer is stepped inside;
                or see `fused_step`.
            TypeError, AssertionError, ValueError, NotImplementedError: as `fused_step`.
        Sync: the host waits for the gradients of each unit in turn, and at the end as `fused_step`.
        Collectives: those of `fused_step`.
        Source: torch has no such method.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.5)
        >>> scaler = GradScaler("cpu")
        >>> with scaler.overlapped_step(optimizer, max_norm=1.0) as step:
        ...     scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> step.norm
        tensor(5.)
        """
        check_has_param_groups(optimizer)
        options = _fused_step.FusedStepOptions(float(max_norm), 2.0, ())
        rule = rule_of(optimizer)
        factor = self._assumed_factor() if rule is not None else None
        ahead = UpdatesAhead(optimizer, rule, factor, options.max_norm, casts_params=cast_params)
        ahead.begin()
        result = OverlappedStep()
        try:
            yield result
            ahead.end()
            with self._reporting_failure(optimizer, takes_norm=True):
                norm = self._single_step(optimizer, replace(options, ahead=ahead), update=update)
            ahead.record_cast_params()
        finally:
            ahead.undo()
        result.finish(norm, ahead)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale for the next iteration. Call it once, after the last `step`.

        It warns once if the scale is at `min_scale` and consecutive steps are still skipped, because a smaller scale
        would not help. The warning comes one update later, or on CUDA when the copy of the scale has arrived on the
        host.

        Args:
            new_scale: new value of the scale, raised to `min_scale` if smaller. A float, or a one-element tensor on the
                scaler's device type. Inf or nan in a tensor on an accelerator is ignored, since checking it would sync.
        Raises:
            AssertionError: no scale exists yet; no gradients were checked; or `new_scale` is an unsuitable tensor.
            ValueError: `new_scale` is negative, inf or nan.
            RuntimeError: the scale is stuck at `min_scale` and `error_if_stuck` is set; or `max_skipped_steps`
                consecutive steps were skipped. The error has their scales, and the names of this rank's parameters with
                inf or nan. On an accelerator it comes at a later update, when the results have arrived on the host.
        Source: torch.amp.GradScaler.update 2.13; differences: `min_scale`, the warning and the ValueError.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._init_and_get_scale("update")
        if new_scale is not None:
            _loss_scale.set_scale_(scale, new_scale, self._device, self._min_scale)
            self._scale_monitor = self._new_monitor()
        else:
            flags: list[Tensor] = []
            accumulations: list[Accumulation] = []
            # Comprehensions would take longer than the work in them.
            for state in self._per_optimizer_states.values():
                for flag in state["found_inf_per_device"].values():
                    flags.append(to_device(flag, scale.device))
                if "accumulation" in state:
                    accumulations.append(state["accumulation"])
            if not flags:
                raise AssertionError("No inf checks were recorded prior to update.")
            for accumulation in accumulations:
                accumulation.check_closed("update")
            self._scale_monitor.warn_if_stuck(
                self._backoff_factor, self._min_scale, self._error_if_stuck, stacklevel=2
            )
            skipped = functools.reduce(torch.add, flags)
            self._scale_monitor.check_skipped(
                skipped, self._backoff_factor, self._min_scale, self._describe_nonfinite
            )
            found_inf = self._scale_flag(scale.device) if any(accumulations) else skipped
            may_reach_minimum = self._scale_monitor.may_reach_minimum(scale, self._backoff_factor)
            kernels.update_scale_(
                scale, growth_tracker, found_inf,
                self._growth_factor, self._backoff_factor, self._growth_interval,
                self._min_scale if may_reach_minimum else None,
            )  # fmt: skip
            self._scale_monitor.record(scale, skipped, self._backoff_factor)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    @contextmanager
    def microbatch(self, optimizer: _Optimizer) -> Generator[Microbatch]:
        """Context manager that adds the gradients of one microbatch to the accumulated ones, if they are all finite.

        Run forward and backward of each microbatch inside, then `unscale_`, `step` or `fused_step` as usual. A
        microbatch with inf or nan is left out of the sum, instead of the whole step being skipped. The gradients are
        multiplied by the number of microbatches over that of those taken. So a loss that is divided by the number of
        microbatches gives the average over those taken. If none is taken, the step is skipped. On an accelerator,
        parameters that only bad microbatches use have a gradient of zeros.

        `update` lowers the scale if a microbatch had inf or nan. Inside, `.grad` is that of this microbatch. If an
        exception leaves the region, the sum is as before, and other ranks wait unless it leaves theirs too. Gradients
        that are set to None between microbatches begin a new sum. Microbatches that were all left out have no gradients
        to set to None, so they count until the next `update`. For several optimizers, nest regions.

        Ranks that share sharded parameters leave out the same microbatches, with or without `no_sync`. Ranks of
        DistributedDataParallel use a `ShardedGradScaler`, and no `no_sync` of that module.

        Returns:
            An object whose `skip()` lets this rank contribute nothing, for example because its data are bad. A disabled
            scaler checks nothing, and its `skip()` raises.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: called after `unscale_` or `step` since the last `update`; or inside of another region of this
                optimizer; or the backward has overwritten the accumulated gradients.
            NotImplementedError: a sharded module has trained parameters that the optimizer lacks, or settings whose
                gradients cannot be taken back (`set_requires_all_reduce(False)`, manual finalization); or the model is
                in `no_sync` of DistributedDataParallel; or torch has sharded it.
        Sync: none, with dense gradients on the device of the scale. One if a backward reduces gradients of earlier
            microbatches that ran without synchronisation, as after `no_sync`.
        Collectives: one all-gather of four numbers for each group that parameters are sharded or replicated over (FSDP
            and DTensors), or over the group of a `ShardedGradScaler`. If a bad microbatch was reduced with earlier
            ones, they are reduced again. If two microbatches have gradients of one DTensor with different placements,
            both are redistributed to its placements.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> for factor in (1.0, torch.inf, 3.0):
        ...     with scaler.microbatch(optimizer):
        ...         scaler.scale((weight * factor).sum() / 3).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.detach(), scaler.step_was_taken(optimizer), scaler.get_scale()
        (tensor([0., 0.]), True, 512.0)
        """
        check_has_param_groups(optimizer)
        if not self._enabled:
            yield Microbatch((), None)
            return
        if stage_of(self._per_optimizer_states, optimizer) is not OptState.READY:
            raise RuntimeError(
                "microbatch() is being called after unscale_() or step(); call update() first."
            )
        params = params_of(optimizer)
        groups = self._reporting_groups(params)
        accumulation = self._accumulation_of(optimizer) or Accumulation()
        accumulation.check_closed("microbatch")
        is_first_call = id(optimizer) not in self._per_optimizer_states
        self._per_optimizer_states[id(optimizer)]["accumulation"] = accumulation
        check_results = self._check_results.of(optimizer)
        previous, check_results.accumulation = check_results.accumulation, accumulation
        device_of = functools.partial(self._norm_device, params)
        try:
            with run_microbatch(optimizer, accumulation, device_of, groups, self._has_peers) as microbatch:
                yield microbatch
        except BaseException:
            check_results.accumulation = previous
            if is_first_call:
                self._per_optimizer_states.pop(id(optimizer), None)
            raise
        if microbatch.is_skipped and self._scale is None:
            # A rank without any loss steps and updates nevertheless.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def get_scale(self) -> float:
        """Return the scale, or 1.0 if the scaler is disabled. Sync: one, after the first `scale`."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else scale.item()

    def get_growth_factor(self) -> float:
        """Return the factor that the scale grows by."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor that the scale grows by. Raise ValueError if it is nan or below 1.0 (torch accepts any)."""
        _loss_scale.check_growth_factor(new_factor)
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return the factor that the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of a skipped step. Raise ValueError unless it is above 0.0 and at most 1.0."""
        _loss_scale.check_backoff_factor(new_factor)
        self._backoff_factor = new_factor
        self._scale_monitor = self._new_monitor()

    def get_growth_interval(self) -> int:
        """Return the number of consecutive steps without inf or nan after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of consecutive steps without inf or nan after which the scale grows."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries as Python numbers, or an empty dict if the scaler is disabled.

        Call it after `update`. Sync: two, after the first `scale`.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. If it raises, nothing is loaded. A disabled scaler ignores the state.

        Args:
            state_dict: result of `state_dict`, ours or torch's. A scale below `min_scale` is raised to it.
        Raises:
            RuntimeError: the dict is empty, or a number does not fit into the scaler's tensors.
            KeyError: an entry is missing.
            TypeError, ValueError: an entry is not a number, or not one that is valid for its purpose.
        Source: torch.amp.GradScaler.load_state_dict 2.13; differences: the class's.
        """
        if not self._enabled:
            return
        saved = _loss_scale.read_state(state_dict)
        self._init_scale = max(saved.scale, self._min_scale)
        self._init_growth_tracker = saved.growth_tracker
        if self._scale is not None:
            self._scale.fill_(self._init_scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(saved.growth_tracker)
        self._growth_factor = saved.growth_factor
        self._backoff_factor = saved.backoff_factor
        self._growth_interval = saved.growth_interval
        self._loaded = self._scale is None
        self._scale_monitor = self._new_monitor()

    # Methods that subclasses override and other libraries call, with torch's names and arguments.
    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker, or raise if they do not exist. `funcname` is named in the error."""
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            missing = "_scale" if scale is None else "_growth_tracker"
            raise AssertionError(
                f"Attempted {funcname} but {missing} is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

    def _unscale_grads_(
        self, optimizer: _Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> FoundInf:
        """Multiply every gradient by `inv_scale` in place. Return the inf/nan flag of each device.

        Both tensors are f32, with one element, on any device. The flags start as copies of `found_inf`.
        Without `allow_fp16`, float16 gradients raise, because their unscaled values may vanish.
        """
        found_inf_per_device: FoundInf = {}
        for device, grads in _gradients.sorted_gradients(optimizer, allow_fp16):
            if device not in found_inf_per_device:
                found_inf_per_device[device] = to_device(found_inf, device, copy=True)
            kernels.unscale_(grads, to_device(inv_scale, device), found_inf_per_device[device])
        _gradients.combine_over_meshes(optimizer, found_inf_per_device, self._combines_ranks_of)
        return found_inf_per_device

    def _unscale_grads_by_(self, optimizer: _Optimizer, scale: Tensor) -> FoundInf:
        """Do the same as `_unscale_grads_`, in two launches instead of six."""
        found_inf_per_device: FoundInf = {}
        for device, grads in _gradients.sorted_gradients(optimizer, self._unscales_fp16):
            if device not in found_inf_per_device:
                found_inf_per_device[device] = torch.zeros((), dtype=torch.float32, device=device)
            kernels.unscale_by_(grads, to_device(scale, device), found_inf_per_device[device])
        _gradients.combine_over_meshes(optimizer, found_inf_per_device, self._combines_ranks_of)
        return found_inf_per_device

    def _check_inf_per_device(self, optimizer: _Optimizer) -> FoundInf:
        """Check the gradients, including float16 ones, and leave them scaled."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inv_scale = torch.ones((), dtype=torch.float32, device=scale.device)
        # torch passes all arguments by position, which overriding methods may rely on.
        local_found_inf = self._unscale_grads_(optimizer, inv_scale, torch.zeros_like(inv_scale), True)
        return self._record_check(optimizer, local_found_inf)["found_inf_per_device"]

    def _found_inf_per_device(self, optimizer: _Optimizer) -> FoundInf:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _maybe_opt_step(
        self, optimizer: _Optimizer, optimizer_state: OptimizerState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call `optimizer.step` if no device found inf or nan. Sync: one for each device."""
        taken = not sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        result = cast("float | None", optimizer.step(*args, **kwargs)) if taken else None
        self._check_results.of(optimizer).taken = taken
        return result

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        tracker = self._growth_tracker
        return self._init_growth_tracker if tracker is None else cast("int", tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_check_results"], state["_scale_monitor"]
        if not self._enabled:
            return state
        if len(self._per_optimizer_states) != 0:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # Save numbers instead of the tensors, which the first `scale` creates again.
        numbers = {"_init_scale": self.get_scale(), "_init_growth_tracker": self._get_growth_tracker()}
        return state | numbers | {"_scale": None, "_growth_tracker": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_records()

    # Methods that `ShardedGradScaler` overrides for many processes.
    def _reduce_found_inf(self, found_inf_per_device: FoundInf) -> FoundInf:
        """Combine the flags of all processes. The result decides whether the step is taken and the scale falls.

        The argument is not changed. It is empty if the optimizer has no gradients.
        """
        return found_inf_per_device

    def _reporting_failure(
        self, *optimizers: _Optimizer, takes_norm: bool = False, keeps_norms: bool = False
    ) -> AbstractContextManager[None]:
        """Context manager that reports to other processes if the check that they wait for fails inside.

        Args:
            takes_norm: they combine a norm. Otherwise they only combine flags.
            keeps_norms: they combine the norm of each parameter.
        """
        return nullcontext()

    def _combines_ranks_of(self, mesh: DeviceMesh) -> bool:
        """Return whether `_reduce_found_inf` combines the flags of all ranks of `mesh`."""
        return False

    def _agree(self, norms: Norms, found_inf_per_device: FoundInf) -> tuple[Tensor, FoundInf]:
        """Combine the norms and flags of all processes."""
        if norms.are_sharded:
            return _fused_step.agree_over_shards(norms, found_inf_per_device)
        return norms.replicated, self._reduce_found_inf(found_inf_per_device)

    def _reporting_groups(self, params: Sequence[Tensor]) -> list[dist.ProcessGroup | None]:
        """Return the groups over which ranks report which gradients are not finite."""
        return member_groups(params)

    def _norm_device(self, params: Sequence[Tensor]) -> torch.device:
        """Return the device on which norms and flags of `params` are combined."""
        if self._enabled and self._scale is not None:
            return self._scale.device
        return next((param.device for param in params if param.grad is not None), torch.device("cpu"))

    # Helpers that only this class uses.
    def _reset_records(self) -> None:
        self._check_results = KeptResults()
        self._scale_monitor = self._new_monitor()

    def _new_monitor(self) -> SkipMonitor:
        return SkipMonitor(self._max_skipped_steps)

    def _describe_nonfinite(self) -> str:
        """Return which gradients of this rank hold inf or nan, in the optimizers that were checked since `update`."""
        names: dict[str, None] = {}
        for optimizer, check_results in self._check_results.items():
            state = self._per_optimizer_states.get(id(optimizer))
            if state is None:
                continue
            nonfinite = _gradients.nonfinite_parameters(optimizer, check_results.low_precision_params, {}, ())
            names |= dict.fromkeys(name for name, _, _ in nonfinite)
            if "accumulation" in state:
                names |= dict.fromkeys(
                    name for entry in state["accumulation"].skipped(()) for name in entry.names
                )
        if not names:
            return "No gradient of this rank holds inf or nan now"
        return f"This rank's gradients with inf or nan are {describe_names(list(names))}"

    def _unscale_locally_(self, optimizer: _Optimizer, scale: Tensor) -> FoundInf:
        """Divide the gradients by `scale` in place and check them. Return the flags of this process."""
        if getattr(self._unscale_grads_, "__func__", None) is _UNSCALE_GRADS:
            return self._unscale_grads_by_(optimizer, scale)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        return self._unscale_grads_(optimizer, kernels.inverse(scale), found_inf, self._unscales_fp16)

    def _record_check(self, optimizer: _Optimizer, local_found_inf: FoundInf) -> OptimizerState:
        """Combine this process's flags with those of other processes, and record both."""
        global_found_inf = self._found_inf_of_accumulated(optimizer, self._reduce_found_inf(local_found_inf))
        check_results = self._check_results.of(optimizer)
        check_results.global_found_inf, check_results.local_found_inf = global_found_inf, local_found_inf
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = global_found_inf
        return state

    def _accumulation_of(self, optimizer: _Optimizer) -> Accumulation | None:
        state = self._per_optimizer_states.get(id(optimizer)) if self._enabled else None
        return None if state is None else state.get("accumulation") or None

    def _assumed_factor(self) -> kernels.HostCopy | float | None:
        """Return the factor of gradients that are not clipped, or None if it is not known yet."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        if scale is None:  # the first loss is not scaled yet
            scale = torch.tensor(self._init_scale, dtype=torch.float32, device="cpu")
        if not kernels.has_host_copies(scale.device):
            return None
        return kernels.HostCopy(kernels.inverse(scale).reshape(1))

    def _scale_of_accumulated(self, optimizer: _Optimizer, scale: Tensor, call: str) -> Tensor:
        """Return the scale of the accumulated gradients, which may lack microbatches."""
        accumulation = self._accumulation_of(optimizer)
        if accumulation is None:
            return scale
        accumulation.check_closed(call)
        return accumulation.scaled(scale)

    def _found_inf_of_accumulated(self, optimizer: _Optimizer, found_inf_per_device: FoundInf) -> FoundInf:
        """Return the flags of the accumulated gradients. They are set if no microbatch was taken."""
        accumulation = self._accumulation_of(optimizer)
        if accumulation is None:
            return found_inf_per_device
        if not found_inf_per_device:
            device = self._norm_device(())
            return {device: accumulation.is_empty(device)}
        return {
            device: torch.maximum(flag, accumulation.is_empty(device).reshape(flag.shape))
            for device, flag in found_inf_per_device.items()
        }

    def _scale_flag(self, device: torch.device) -> Tensor:
        """Return whether the scale must fall, which a microbatch can also decide."""
        flags: list[Tensor] = []
        for state in self._per_optimizer_states.values():
            step_flags = [to_device(flag, device) for flag in state["found_inf_per_device"].values()]
            accumulation = state.get("accumulation")
            flags += accumulation.scale_flags(step_flags, device) if accumulation else step_flags
        return functools.reduce(torch.add, flags)

    def _scale_from(self, device: torch.device) -> Tensor:
        """Return the scale's tensor. Create it on `device` if it does not exist yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def _init_and_get_scale(
        self, funcname: str, optimizer: _Optimizer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker. Create loaded ones on the device of the first gradient, or else `device`."""
        if self._scale is None and self._loaded:
            grad = None if optimizer is None else _gradients.first_gradient(optimizer)
            self._lazy_init_scale_growth_tracker(torch.device(self._device) if grad is None else grad.device)
        return self._check_scale_growth_tracker(funcname)

    def _step_if_finite(
        self,
        optimizer: _Optimizer,
        stage: OptState,
        check_results: CheckResults,
        *args: object,
        **kwargs: object,
    ) -> float | None:
        previous = check_results.global_found_inf, check_results.local_found_inf
        if stage is OptState.READY:
            self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"]:
            if stage is OptState.READY:
                del self._per_optimizer_states[id(optimizer)]
                check_results.global_found_inf, check_results.local_found_inf = previous
            check_step(optimizer)
            raise AssertionError("No inf checks were recorded for this optimizer.")
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _step_with_attributes(
        self, optimizer: _Optimizer, stage: OptState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call the `step` of an optimizer that divides by `grad_scale` and skips on `found_inf` itself."""
        is_scaled = stage is OptState.READY
        if is_scaled:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        if scale is None:
            raise AssertionError("_get_scale_async returned None")
        global_found_inf = self._found_inf_per_device(optimizer)
        local_found_inf = self._check_results.of(optimizer).local_found_inf or {}
        grad_scale = scale if is_scaled else None
        try:
            with amp_attributes(optimizer, grad_scale, global_found_inf, local_found_inf, scale.device):
                return cast("float | None", optimizer.step(*args, **kwargs))
        except BaseException:
            if is_scaled:
                del self._per_optimizer_states[id(optimizer)]
            raise


# Subclasses and users may replace the method; `unscale_` compares with this to find out.
_UNSCALE_GRADS = GradScaler._unscale_grads_

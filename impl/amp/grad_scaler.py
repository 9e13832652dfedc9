"""Gradient scaling: a loss times a large number, gradients over it again, no step where it was too large."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from impl import kernels
from impl.amp import _fused_step, _gradients, _loss_scale
from impl.amp._availability import amp_definitely_not_available, warn_of_missing_cuda
from impl.amp._aware_optimizers import amp_attributes, takes_scaler, warn_of_scaler_as_argument
from impl.amp._loss_scale import SMALLEST_SCALE, FloorWatch
from impl.amp._opt_state import CheckResults, Found, KeptResults, OptimizerState, OptState, advance, stage_of

# torch's name: pickles of torch's scalers ask for it.
from impl.amp._opt_state import refresh_per_optimizer_state as _refresh_per_optimizer_state
from impl.kernels import placed
from impl.optim._refusals import refuse_what_has_no_groups
from impl.optim._shards import Norms

__all__ = ["GradScaler", "OptState"]

_Optimizer = torch.optim.Optimizer


class GradScaler:
    """Scales a loss, so that small float16 gradients do not vanish, and skips the steps that overflowed by it.

    One iteration is `scale(loss).backward()`, then `step(optimizer)` for each optimizer, then `update()`; where
    gradients are to be looked at or clipped, `unscale_(optimizer)` comes before the step. After a step that found
    inf or nan the scale falls by `backoff_factor`; after `growth_interval` steps without, it grows by `growth_factor`.

    After an exception from any method the scaler, the gradients and the optimizer's attributes are as they were; but
    an error of the optimizer's own `step` leaves its gradients unscaled, and the scaler knows that they are.

    Args:
        device: "cuda", "cpu" or another device type. "cuda" without CUDA switches the scaler off, with a warning.
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: below 1.
        growth_interval: steps without inf or nan, one after the other, before the scale grows.
        enabled: False makes `step` call `optimizer.step`, `scale` return what it is given, and the rest do nothing.
        min_scale: the scale never falls below it.
        error_if_stuck: raise, instead of warning, when the scale lies on `min_scale` and three steps in a row or more
            were skipped.
    Raises:
        AssertionError: a factor is on the wrong side of 1.
        ValueError: `init_scale` or `min_scale` can be no scale.
    Sync: none, in all methods that do not say so; but where gradients lie on the host and the scale on a device, what
        checks them or steps by them waits for the scale and the check's results.
    Source: torch.amp.GradScaler 2.13; differences: `min_scale` and what watches it, float16 and bfloat16 losses are
        scaled in float32, a positional closure is refused like one by keyword, a loaded scale is known before the first
        `scale`, calls that fail change nothing (`load_state_dict` too), and values that would ruin the scale or the
        gradients in silence are refused. New: `fused_step`, `found_inf`, `step_was_taken`, `nonfinite_parameters`.

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

    # Ours. The values here serve scalers that torch pickled.
    _min_scale: float = SMALLEST_SCALE
    _error_if_stuck: bool = False
    _loaded: bool = False  # a state dict was, and the scale is known though it has no tensor yet
    _frames_above: int = 0  # between the methods here and who called them, for the places that warnings name
    _has_peers: bool = False  # a step waits for other processes, whatever the parameters are
    _unscales_fp16: bool = False  # or refuses such gradients, whose unscaled values may vanish

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
    ) -> None:
        self._device = device
        self._enabled = enabled
        if device == "cuda" and enabled and amp_definitely_not_available():
            warn_of_missing_cuda(stacklevel=2 + self._frames_above)
            self._enabled = False
        self._start_watching()
        if not self._enabled:
            return
        self._min_scale = _loss_scale.checked_settings(growth_factor, backoff_factor, init_scale, min_scale)
        self._error_if_stuck = error_if_stuck
        # torch's own names, since others read and assign them; there only when the scaler is enabled. `_scale` and
        # `_growth_tracker` are 0-dim, f32 and i32, and None until the first `scale`.
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
        """Multiply a loss, or losses nested in iterables, by the scale; gradients of the result come out scaled.

        Args:
            outputs: a tensor of any shape, dtype and device, or an iterable of such, nested as deep as one likes.
        Returns:
            The like of `outputs`: lists and tuples keep their type, other iterables become lazy iterators. Float16 and
            bfloat16 come back as float32, in which a scaled loss fits; in float16 it is inf above 65504.
        Raises:
            ValueError: something in `outputs` is neither a tensor nor an iterable; a string is neither.
        Source: torch.amp.GradScaler.scale 2.13; differences: float32 also of one dimension and more (torch: as it was).

        >>> GradScaler("cpu", init_scale=65536.0).scale([torch.tensor([2.0], dtype=torch.float16)])
        [tensor([131072.])]
        """
        if not self._enabled:
            return outputs
        was_unknown = self._scale is None
        try:
            if isinstance(outputs, Tensor):
                return _loss_scale.times(outputs, placed(self._scale_from(outputs.device), outputs.device))
            return _loss_scale.scaled(outputs, _loss_scale.PerDevice(self._scale_from))
        except BaseException:
            if was_unknown:
                self._scale = self._growth_tracker = None
            raise

    def unscale_(self, optimizer: _Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, in place, and check them for inf and nan.

        To be called once all gradients are accumulated, where they are to be read or clipped before `step`, which
        otherwise does it. Gradients are unscaled also when one of them is inf or nan; sparse float16 ones are replaced
        by coalesced ones.

        Raises:
            RuntimeError: called twice, or after `step`, since the last `update`; a gradient's elements share memory.
            AssertionError: there is no scale yet: neither `scale` nor `load_state_dict` was called.
            ValueError: there are float16 gradients; or one gradient belongs to two parameters of the optimizer.
        Source: torch.amp.GradScaler.unscale_ 2.13; differences: the last two refusals (torch unscales those twice).
        """
        if not self._enabled:
            return
        scale, _ = self._recalled("unscale_", optimizer)
        unscaled = advance(stage_of(self._per_optimizer_states, optimizer), "unscale_")
        if getattr(self._unscale_grads_, "__func__", None) is _UNSCALE_GRADS:
            state = self._remember_found(optimizer, self._unscale_grads_by_(optimizer, scale))
        else:
            state = self._check_grads_(optimizer, kernels.inverse(scale), self._unscales_fp16)
        state["stage"] = unscaled

    def step(self, optimizer: _Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` on unscaled gradients, unless one of them holds inf or nan.

        An optimizer whose `_step_supports_amp_scaling` is true is always called: it finds `grad_scale` (f32, 0-dim, or
        None after `unscale_`) and `found_inf` (f32, 0-dim) in its attributes and skips for itself.

        Returns:
            What `optimizer.step` returns, None of one that was skipped; `step_was_taken` tells.
        Raises:
            RuntimeError: there is a closure, which would run unscaled; or called twice since the last `update`.
            AssertionError: there is no scale yet; or no parameter of the optimizer has a gradient.
        Sync: one for each device with gradients; none where the optimizer skips for itself.
        Source: torch.amp.GradScaler.step 2.13; differences: the class's.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._recalled("step", optimizer)
        stage = stage_of(self._per_optimizer_states, optimizer)
        stepped = advance(stage, "step")
        check_results = self._check_results.of(optimizer)
        check_results.taken = None
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_if_finite(optimizer, stage, check_results, *args, **kwargs)
        elif takes_scaler(optimizer.step):
            warn_of_scaler_as_argument(stacklevel=2 + self._frames_above)
            result = cast("float | None", optimizer.step(*args, **(kwargs | {"grad_scaler": self})))
        else:
            result = self._step_with_attributes(optimizer, stage, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = stepped
        check_results.checked = check_results.stepped = state["found_inf_per_device"]
        return result

    def fused_step(
        self,
        optimizer: _Optimizer,
        max_norm: float = math.inf,
        norm_type: float = 2.0,
        *,
        low_precision_params: Iterable[Tensor] = (),
        update: bool = True,
    ) -> Tensor:
        """Do what `unscale_`, `clip_grad_norm_`, `step` and `update` do, on the CPU and CUDA in two passes over memory.

        Adam, AdamW, SGD and Adagrad of `torch.optim` step as with `fused=True`, whatever they were built with, from
        gradients that stay scaled and unclipped; from scaled copies of them on other devices, and on CUDA without
        Triton, for parameters in float64, or while a CUDA graph is captured. For every other optimizer, one with hooks
        before its step or something in the place of that method, and gradients that no fused update takes (sparse
        ones, say, which are coalesced), `.grad` is unscaled and clipped in place before `optimizer.step()`.
        After `unscale_` the gradients are taken as they are, and what it found decides. Of what a subclass may override
        a fused update asks neither `_unscale_grads_` nor `_maybe_opt_step`: it does the work of both itself.

        Args:
            optimizer: owns the gradients of one norm. Its hooks and schedulers see a step, if it is taken; on a device
                other than the CPU always, as with an optimizer that skips for itself.
            max_norm: clip the unscaled gradients to it, as `clip_grad_norm_` does; inf clips nothing.
            norm_type: any float; 0 counts the gradients, or parts of sharded ones, that hold a non-zero element.
            low_precision_params: a copy of each parameter of the optimizer, to which the new parameters are written in
                the same pass. Gradients are taken from a copy where the parameter has none.
            update: False leaves the scale to an `update()` that follows when other optimizers have stepped too.
        Returns:
            0-dim norm of the unscaled gradients before clipping, as `clip_grad_norm_` returns it; whatever they make of
            it where the step is skipped. In float32 or float64 where parameters are sharded.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: the optimizer has stepped since the last `update`; parameters are sharded and no fused update
                takes this rank's gradients; or see `update`.
            AssertionError: there is no scale yet; or no parameter of the optimizer has a gradient.
            ValueError: `max_norm` is nan or -inf; `norm_type` is nan; `low_precision_params` do not fit the parameters;
                or a float16 gradient is to be unscaled in place. What an optimizer without a fused update refuses
                itself, it refuses after that.
        Sync: none for the four optimizers (but when momentum with `dampening` begins) and for those that take
            `found_inf` themselves. For others, one where a state lies on the host or is still to be made; else the step
            is made and put back, from copies of all parameters and states, with one after a step that changed numbers
            of the host's too, or what there is. Coalescing waits, as in torch.
        Collectives: none; one all-gather where a process group holds the parameters in parts (FSDP, DTensor).

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> scaler.fused_step(optimizer, max_norm=1.0)
        tensor(5.)
        >>> weight.detach()
        tensor([0.7000, 0.6000])
        """
        refuse_what_has_no_groups(optimizer)
        options = _fused_step.FusedStepOptions(float(max_norm), float(norm_type), tuple(low_precision_params))
        if not self._enabled:
            return _fused_step.fused_step(self, optimizer, options, scale=None, known=None).norm
        scale, _ = self._recalled("fused_step", optimizer)
        stage = stage_of(self._per_optimizer_states, optimizer)
        stepped = advance(stage, "step")
        known = self._found_inf_per_device(optimizer) if stage is OptState.UNSCALED else None
        done = _fused_step.fused_step(self, optimizer, options, scale, known)
        self._per_optimizer_states[id(optimizer)].update(stage=stepped, found_inf_per_device=done.found)
        check_results = self._check_results.of(optimizer)
        check_results.note(done.found, done.here, done.taken, options.low_precision_params)
        if update:
            self.update()
        return done.norm

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what this iteration's checks found; to be called once, after the last `step`.

        Warns, once, when the scale has come down to `min_scale` and steps are still skipped one after the other: no
        smaller scale would help. It is told one update later, and on CUDA when the copy of the scale has arrived.

        Args:
            new_scale: set the scale to this, but not below `min_scale`: a float, or a tensor of one element on the
                scaler's device type, of which an inf or nan on an accelerator, unseen without waiting, changes nothing.
        Raises:
            AssertionError: there is no scale yet; nothing was checked; or `new_scale` is a tensor of another kind.
            ValueError: `new_scale` is negative, inf or nan.
            RuntimeError: the scale is stuck and `error_if_stuck` is set.
        Source: torch.amp.GradScaler.update 2.13; differences: `min_scale`, the warning and the ValueError.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._recalled("update")
        if new_scale is not None:
            _loss_scale.set_scale_(scale, new_scale, self._device, self._min_scale)
            self._watch = FloorWatch()
        else:
            states = self._per_optimizer_states.values()
            found = [placed(f, scale.device) for s in states for f in s["found_inf_per_device"].values()]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._watch.tell(self._backoff_factor, self._min_scale, self._error_if_stuck, stacklevel=2)
            any_found = functools.reduce(torch.add, found)
            kernels.update_scale_(
                scale, growth_tracker, any_found,
                self._growth_factor, self._backoff_factor, self._growth_interval, self._min_scale,
            )  # fmt: skip
            self._watch.look(scale, any_found)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def found_inf(self, optimizer: _Optimizer) -> Tensor:
        """Whether the last check of `optimizer`, by `unscale_` or `step`, found inf or nan.

        Returns:
            f32, 0-dim, on the scale's device: 1.0 if it did, else 0.0, as always of a scaler that is switched off.
        Raises:
            RuntimeError: this scaler has not checked the optimizer yet.
        Sync: none, so a metric or a captured graph may use it.
        """
        if not self._enabled:
            params = (param for group in optimizer.param_groups for param in group["params"])
            return torch.zeros((), device=next((param.device for param in params), None))
        found = self._check_results.of(optimizer).known()
        scale, _ = self._check_scale_growth_tracker("found_inf")
        flags = [placed(flag, scale.device) for flag in found.values()]
        return torch.stack([torch.zeros_like(scale), *flags]).amax()

    def step_was_taken(self, optimizer: _Optimizer) -> bool:
        """Whether the last `step` of `optimizer` was taken, and not skipped; may be asked also after `update`.

        It is the check's answer, whatever a subclass's `_maybe_opt_step` decides; True if the scaler is switched off.

        Raises:
            RuntimeError: there was no `step` of the optimizer yet, or it checked nothing.
        Sync: one, and none where `step` has waited already.
        """
        return self._check_results.of(optimizer).step_was_taken() if self._enabled else True

    def nonfinite_parameters(self, optimizer: _Optimizer) -> list[str]:
        """Tell whose gradients hold inf or nan; ask after `unscale_` or `step`, before they are cleared or clipped.

        Returns:
            Names, in the optimizer's order: those in `param_names`, where the optimizer was made from
            `named_parameters()`, else group, index and shape. Of a DTensor this rank's part is looked at.
        Raises:
            TypeError: it has no `param_groups`.
            RuntimeError: the last check found inf or nan, and the gradients in which it did are gone.
        Sync: one for each device. The gradients are read again; a scaler that is not asked pays nothing.

        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.5)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(layer(torch.tensor([1.0, torch.inf])).sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> scaler.nonfinite_parameters(optimizer)
        ['weight']
        """
        refuse_what_has_no_groups(optimizer)
        found = self._check_results.of(optimizer)
        return _gradients.nonfinite_parameters(optimizer, found.low_precision_params, found.here or {})

    def get_scale(self) -> float:
        """Return the scale; 1.0 of a scaler that is switched off. Sync: one, once `scale` has been called."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else scale.item()

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; nan or below 1.0 is a ValueError (torch takes any value)."""
        _loss_scale.check_growth_factor(new_factor)
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale falls."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale falls; it must be above 0.0 and not above 1.0, or is a ValueError."""
        _loss_scale.check_backoff_factor(new_factor)
        self._backoff_factor = new_factor
        self._watch = FloorWatch()

    def get_growth_interval(self) -> int:
        """Return after how many steps without inf or nan, one after the other, the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many steps without inf or nan, one after the other, the scale grows."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Whether the scaler scales, or was switched off."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, torch's five entries, as Python numbers; to be called after `update`.

        Empty if the scaler is switched off. Sync: two, once `scale` has been called.
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
        """Take over a saved state, wholly or, if it is refused, not at all. A scaler that is switched off ignores it.

        Args:
            state_dict: what `state_dict` returned, ours or torch's. A scale below `min_scale` is lifted to it.
        Raises:
            RuntimeError: it is empty, or a number fits no tensor of the scaler's.
            KeyError: an entry is missing.
            TypeError, ValueError: an entry is no number, or none that a scaler can hold.
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
        self._watch = FloorWatch()

    # What subclasses override, and other libraries call; torch's names and arguments.
    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker, for `funcname`, which cannot do without."""
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
    ) -> Found:
        """Multiply every gradient by `inv_scale` in place; return, for each of their devices, what was found there.

        Both tensors are f32, of one element, on any device; `found_inf` is copied, and the copies are returned.
        Without `allow_fp16` float16 gradients are refused, whose unscaled values may vanish.
        """
        found: Found = {}
        for device, grads in _gradients.sorted_gradients(optimizer, allow_fp16):
            if device not in found:
                found[device] = placed(found_inf, device, copy=True)
            kernels.unscale_(grads, placed(inv_scale, device), found[device])
        return found

    def _unscale_grads_by_(self, optimizer: _Optimizer, scale: Tensor) -> Found:
        """Do what `_unscale_grads_` does, in two launches rather than in six."""
        found: Found = {}
        for device, grads in _gradients.sorted_gradients(optimizer, self._unscales_fp16):
            if device not in found:
                found[device] = torch.zeros((), dtype=torch.float32, device=device)
            kernels.unscale_by_(grads, placed(scale, device), found[device])
        return found

    def _check_inf_per_device(self, optimizer: _Optimizer) -> Found:
        """Check the gradients, float16 ones too, and leave them scaled."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        return self._check_grads_(optimizer, one, allow_fp16=True)["found_inf_per_device"]

    def _found_inf_per_device(self, optimizer: _Optimizer) -> Found:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _maybe_opt_step(
        self, optimizer: _Optimizer, optimizer_state: OptimizerState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call `optimizer.step` if the check found nothing. Sync: one for each device."""
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
        del state["_check_results"], state["_watch"]
        if not self._enabled:
            return state
        if len(self._per_optimizer_states) != 0:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # Numbers in the place of the tensors, which come back at the first `scale`.
        numbers = {"_init_scale": self.get_scale(), "_init_growth_tracker": self._get_growth_tracker()}
        return state | numbers | {"_scale": None, "_growth_tracker": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_watching()

    # What `ShardedGradScaler` does otherwise, for many processes.
    def _reduce_found_inf(self, found_inf_per_device: Found) -> Found:
        """Agree with other processes on what any check found here; what is returned decides on step and scale.

        What is given is left as it is, and empty if the optimizer has no gradients.
        """
        return found_inf_per_device

    def _agree(self, norms: Norms, found_inf_per_device: Found) -> tuple[Tensor, Found]:
        """Agree with other processes on a norm and on what a check found, in one collective, if any."""
        if norms.sharded:
            return _fused_step.agree_in_one_group(norms, found_inf_per_device)
        return norms.replicated, self._reduce_found_inf(found_inf_per_device)

    def _place_of_norms(self, params: Sequence[Tensor]) -> torch.device:
        """Where numbers about all gradients of `params` meet."""
        if self._enabled and self._scale is not None:
            return self._scale.device
        return next((param.device for param in params if param.grad is not None), torch.device("cpu"))

    # Our own.
    def _start_watching(self) -> None:
        self._check_results = KeptResults()
        self._watch = FloorWatch()

    def _check_grads_(self, optimizer: _Optimizer, inv_scale: Tensor, allow_fp16: bool) -> OptimizerState:
        """Multiply the gradients by `inv_scale`, and remember what was found in them."""
        none_found = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
        return self._remember_found(
            optimizer, self._unscale_grads_(optimizer, inv_scale, none_found, allow_fp16)
        )

    def _remember_found(self, optimizer: _Optimizer, here: Found) -> OptimizerState:
        """Agree with other processes on what was found in the gradients here, and remember it."""
        found = self._reduce_found_inf(here)
        check_results = self._check_results.of(optimizer)
        check_results.checked, check_results.here = found, here
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = found
        return state

    def _scale_from(self, device: torch.device) -> Tensor:
        """The scale's tensor, which settles on `device` if it has no place yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def _recalled(self, funcname: str, optimizer: _Optimizer | None = None) -> tuple[Tensor, Tensor]:
        """Scale and growth tracker; loaded ones settle where the first gradient lies, or else on `device`."""
        if self._scale is None and self._loaded:
            grad = None if optimizer is None else _gradients.first_gradient(optimizer)
            self._lazy_init_scale_growth_tracker(torch.device(self._device) if grad is None else grad.device)
        return self._check_scale_growth_tracker(funcname)

    def _step_if_finite(
        self, optimizer: _Optimizer, stage: OptState, check_results: CheckResults, *args: Any, **kwargs: Any
    ) -> float | None:
        before = check_results.checked, check_results.here
        if stage is OptState.READY:
            self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"]:
            if stage is OptState.READY:
                del self._per_optimizer_states[id(optimizer)]
                check_results.checked, check_results.here = before
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
        found, here = self._found_inf_per_device(optimizer), self._check_results.of(optimizer).here or {}
        try:
            with amp_attributes(optimizer, scale if is_scaled else None, found, here, scale.device):
                return cast("float | None", optimizer.step(*args, **kwargs))
        except BaseException:
            if is_scaled:
                del self._per_optimizer_states[id(optimizer)]
            raise


# Subclasses, and users who assign the attribute, may do this in their own way.
_UNSCALE_GRADS = GradScaler._unscale_grads_

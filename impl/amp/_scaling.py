"""What a `GradScaler` does when it is on, and when it is switched off; state and overridable names are the scaler's."""

# This is the scaler's other half: it works on attributes that bear torch's underscored names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from impl import kernels
from impl.amp._fused_step import FusedStepOptions, fused_step
from impl.amp._loss_scale import FloorWatch, PerDevice, check_new_scale, inverse, read_state, times
from impl.amp._opt_state import OptState, advance, refresh_per_optimizer_state

if TYPE_CHECKING:
    from impl.amp.grad_scaler import GradScaler

_Optimizer = torch.optim.Optimizer


@dataclass(slots=True)
class CheckResults:
    """What was found about one optimizer, kept beyond `update`."""

    checked: dict[torch.device, Tensor] | None = None  # by its last check
    here: dict[torch.device, Tensor] | None = None  # the same, as far as this process's gradients tell
    stepped: dict[torch.device, Tensor] | None = None  # by the check that its last step went by
    taken: bool | None = None  # that step, once the host knows
    copies: Sequence[Tensor] = ()  # on which the gradients lie that were checked, where not on the parameters


class Scaling:
    """What an enabled scaler does. Holds nothing: state and overridable names are the scaler's."""

    def scale(self, scaler: GradScaler, outputs: Any) -> Any:
        was_unknown = scaler._scale is None
        try:
            if isinstance(outputs, Tensor):
                home = _scale_of(scaler, outputs.device)
                return times(outputs, kernels.placed(home, outputs.device))
            return _scaled(outputs, PerDevice(lambda device: _scale_of(scaler, device)))
        except BaseException:
            if was_unknown:
                scaler._scale = scaler._growth_tracker = None
            raise

    def unscale_(self, scaler: GradScaler, optimizer: _Optimizer) -> None:
        _recall_scale(scaler, optimizer)
        scale, _ = scaler._check_scale_growth_tracker("unscale_")
        unscaled = advance(stage_of(scaler, optimizer), "unscale_")
        found = scaler._checked(optimizer, inverse(scale), allow_fp16=False)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = found
        state["stage"] = unscaled

    def step(self, scaler: GradScaler, optimizer: _Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        _recall_scale(scaler, optimizer)
        scaler._check_scale_growth_tracker("step")
        stage = stage_of(scaler, optimizer)
        stepped = advance(stage, "step")
        check_results = scaler._check_results_on(optimizer)
        check_results.taken = None
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            result = _step_if_finite(scaler, optimizer, stage, check_results, *args, **kwargs)
        elif _takes_scaler(optimizer.step):
            # stacklevel: the caller of the scaler's step.
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
                FutureWarning,
                stacklevel=3 + scaler._frames_above,
            )
            result = cast("float | None", optimizer.step(*args, **(kwargs | {"grad_scaler": scaler})))
        else:
            result = _step_with_attributes(scaler, optimizer, stage, *args, **kwargs)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"] = stepped
        check_results.checked = check_results.stepped = state["found_inf_per_device"]
        return result

    def fused_step(
        self, scaler: GradScaler, optimizer: _Optimizer, options: FusedStepOptions, update: bool
    ) -> Tensor:
        _recall_scale(scaler, optimizer)
        scale, _ = scaler._check_scale_growth_tracker("fused_step")
        stage = stage_of(scaler, optimizer)
        stepped = advance(stage, "step")
        known = scaler._found_inf_per_device(optimizer) if stage is OptState.UNSCALED else None
        done = fused_step(scaler, optimizer, options, scale, known)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = stepped, done.found
        check_results = scaler._check_results_on(optimizer)
        check_results.checked = check_results.stepped = done.found
        check_results.here, check_results.taken, check_results.copies = done.here, done.taken, options.copies
        if update:
            scaler.update()
        return done.norm

    def update(self, scaler: GradScaler, new_scale: float | Tensor | None) -> None:
        _recall_scale(scaler, None)
        scale, growth_tracker = scaler._check_scale_growth_tracker("update")
        if new_scale is None:
            _move_scale(scaler, scale, growth_tracker)
        else:
            _set_scale(scaler, scale, new_scale)
            scaler._watch = FloorWatch()
        scaler._per_optimizer_states = defaultdict(refresh_per_optimizer_state)

    def found_inf(self, scaler: GradScaler, optimizer: _Optimizer) -> Tensor:
        found = scaler._check_results_on(optimizer).checked
        if found is None:
            raise RuntimeError(
                "this scaler has not checked the gradients of this optimizer; call unscale_(optimizer) or "
                "step(optimizer) before found_inf(optimizer)"
            )
        scale, _ = scaler._check_scale_growth_tracker("found_inf")
        return torch.stack([torch.zeros_like(scale), *_at(scale.device, found)]).amax()

    def step_was_taken(self, scaler: GradScaler, optimizer: _Optimizer) -> bool:
        check_results = scaler._check_results_on(optimizer)
        if check_results.stepped is None:
            raise RuntimeError(
                "this scaler has not stepped this optimizer (or cannot know, if it takes no weak references); call "
                "step(optimizer) before step_was_taken(optimizer)"
            )
        if check_results.taken is None:
            check_results.taken = not any(flag.item() for flag in check_results.stepped.values())
        return check_results.taken

    def get_scale(self, scaler: GradScaler) -> float:
        scale = scaler._get_scale_async()
        return scaler._init_scale if scale is None else scale.item()

    def get_growth_tracker(self, scaler: GradScaler) -> int:
        tracker = scaler._growth_tracker
        return scaler._init_growth_tracker if tracker is None else cast("int", tracker.item())

    def state_dict(self, scaler: GradScaler) -> dict[str, Any]:
        return {
            "scale": scaler.get_scale(),
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": scaler._get_growth_tracker(),
        }

    def load_state_dict(self, scaler: GradScaler, state_dict: dict[str, Any]) -> None:
        state = read_state(state_dict)
        scale = max(state.scale, scaler._min_scale)
        if scaler._scale is not None:
            scaler._scale.fill_(scale)
        if scaler._growth_tracker is not None:
            scaler._growth_tracker.fill_(state.growth_tracker)
        scaler._init_scale = scale
        scaler._init_growth_tracker = state.growth_tracker
        scaler._growth_factor = state.growth_factor
        scaler._backoff_factor = state.backoff_factor
        scaler._growth_interval = state.growth_interval
        scaler._loaded = scaler._scale is None
        scaler._watch = FloorWatch()

    def at_rest(self, scaler: GradScaler, state: dict[str, Any]) -> dict[str, Any]:
        """`state` as it is pickled: with numbers for the tensors, which come back at the first `scale`."""
        if len(scaler._per_optimizer_states) != 0:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        return state | {
            "_init_scale": scaler.get_scale(),
            "_init_growth_tracker": scaler._get_growth_tracker(),
            "_scale": None,
            "_growth_tracker": None,
        }


class PassingThrough:
    """What a scaler does that is switched off: nothing, but it steps the optimizer."""

    def scale(self, scaler: GradScaler, outputs: Any) -> Any:
        return outputs

    def unscale_(self, scaler: GradScaler, optimizer: _Optimizer) -> None:
        return None

    def step(self, scaler: GradScaler, optimizer: _Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return cast("float | None", optimizer.step(*args, **kwargs))

    def fused_step(
        self, scaler: GradScaler, optimizer: _Optimizer, options: FusedStepOptions, update: bool
    ) -> Tensor:
        return fused_step(scaler, optimizer, options, scale=None, known=None).norm

    def update(self, scaler: GradScaler, new_scale: float | Tensor | None) -> None:
        return None

    def found_inf(self, scaler: GradScaler, optimizer: _Optimizer) -> Tensor:
        params = (param for group in optimizer.param_groups for param in group["params"])
        return torch.zeros((), device=next((param.device for param in params), None))

    def step_was_taken(self, scaler: GradScaler, optimizer: _Optimizer) -> bool:
        return True

    def get_scale(self, scaler: GradScaler) -> float:
        return 1.0

    def get_growth_tracker(self, scaler: GradScaler) -> int:
        return 0

    def state_dict(self, scaler: GradScaler) -> dict[str, Any]:
        return {}

    def load_state_dict(self, scaler: GradScaler, state_dict: dict[str, Any]) -> None:
        return None

    def at_rest(self, scaler: GradScaler, state: dict[str, Any]) -> dict[str, Any]:
        return state


SCALING = Scaling()
PASSING_THROUGH = PassingThrough()


def _scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """The scale's tensor, which settles on `device` if it has no place yet."""
    scale = scaler._scale
    if scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
        scale = scaler._scale
        assert scale is not None
    return scale


def _recall_scale(scaler: GradScaler, optimizer: _Optimizer | None) -> None:
    """Settle a scale that was loaded, on the device of the optimizer's first gradient or else the scaler's own."""
    if scaler._scale is not None or not scaler._loaded:
        return
    groups = () if optimizer is None else optimizer.param_groups
    params = (param for group in groups for param in group["params"])
    grads = (param.grad for param in params if getattr(param, "grad", None) is not None)
    scaler._lazy_init_scale_growth_tracker(
        next((grad.device for grad in grads), torch.device(scaler._device))
    )


def _scaled(value: Any, scales: PerDevice) -> Any:
    if isinstance(value, Tensor):
        return times(value, scales[value.device])
    if isinstance(value, (list, tuple)):
        return type(value)([_scaled(each, scales) for each in value])
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    return (_scaled(each, scales) for each in cast("Iterable[Any]", value))


def stage_of(scaler: GradScaler, optimizer: _Optimizer) -> OptState:
    state = scaler._per_optimizer_states.get(id(optimizer))
    if state is None:
        return OptState.READY
    stage = state["stage"]
    # By name: others may have put torch's own OptState there.
    return stage if type(stage) is OptState else OptState[stage.name]


def _at(device: torch.device, found_inf: dict[torch.device, Tensor]) -> list[Tensor]:
    return [kernels.placed(flag, device) for flag in found_inf.values()]


def _step_if_finite(
    scaler: GradScaler,
    optimizer: _Optimizer,
    stage: OptState,
    check_results: CheckResults,
    *args: Any,
    **kwargs: Any,
) -> float | None:
    before = check_results.checked, check_results.here
    if stage is OptState.READY:
        scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    if not state["found_inf_per_device"]:
        if stage is OptState.READY:
            del scaler._per_optimizer_states[id(optimizer)]
            check_results.checked, check_results.here = before
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return scaler._maybe_opt_step(optimizer, state, *args, **kwargs)


def _step_with_attributes(
    scaler: GradScaler, optimizer: _Optimizer, stage: OptState, *args: Any, **kwargs: Any
) -> float | None:
    """Call the `step` of an optimizer that divides by `grad_scale` and skips on `found_inf` itself."""
    if stage is OptState.READY:
        scaler._check_inf_per_device(optimizer)
    scale = scaler._get_scale_async()
    if scale is None:
        raise AssertionError("_get_scale_async returned None")
    before = {name: value for name, value in vars(optimizer).items() if name in ("grad_scale", "found_inf")}
    home = _place_of_attributes(scaler, optimizer, scale)
    # An optimizer may come with a scale of its own: whoever set it has multiplied the gradients by it.
    attributes: Any = optimizer
    if stage is OptState.READY:
        attributes.grad_scale = kernels.placed(scale * getattr(optimizer, "grad_scale", 1), home)
    else:
        attributes.grad_scale = getattr(optimizer, "grad_scale", None)
    found = _at(home, scaler._found_inf_per_device(optimizer))
    # 1.0 however many devices found one: fused kernels skip at that value alone.
    attributes.found_inf = functools.reduce(torch.maximum, found) if found else 0
    try:
        result = cast("float | None", optimizer.step(*args, **kwargs))
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)
        if stage is OptState.READY:
            del scaler._per_optimizer_states[id(optimizer)]
        raise
    del attributes.grad_scale, attributes.found_inf
    return result


def _place_of_attributes(scaler: GradScaler, optimizer: _Optimizer, scale: Tensor) -> torch.device:
    """The scale's device; the host where there are gradients, since torch's fused updates copy without blocking."""
    devices = scaler._check_results_on(optimizer).here or {}
    return next((device for device in devices if device.type == "cpu"), scale.device)


_known_to_take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def _takes_scaler(step: Callable[..., Any]) -> bool:
    """Whether `step` has a parameter `grad_scaler`, as torch's fused optimizers once had."""
    function = getattr(step, "__func__", step)
    try:
        return _known_to_take_scaler[function]
    except (KeyError, TypeError):  # not seen yet; or a callable that has no weak references
        takes = "grad_scaler" in inspect.signature(step).parameters
    with contextlib.suppress(TypeError):
        _known_to_take_scaler[function] = takes
    return takes


def _move_scale(scaler: GradScaler, scale: Tensor, growth_tracker: Tensor) -> None:
    device = scale.device
    found = [
        kernels.placed(flag, device)
        for state in scaler._per_optimizer_states.values()
        for flag in state["found_inf_per_device"].values()
    ]
    if not found:
        raise AssertionError("No inf checks were recorded prior to update.")
    skipped = scaler._watch.read(scaler._backoff_factor, scaler._min_scale)
    if skipped >= FloorWatch.PATIENCE and scaler._error_if_stuck:
        raise RuntimeError(_stuck(skipped, scaler._min_scale))
    if skipped == FloorWatch.PATIENCE:
        # stacklevel: the caller of GradScaler.update.
        warnings.warn(_stuck(skipped, scaler._min_scale), RuntimeWarning, stacklevel=4)
    any_found = functools.reduce(torch.add, found)
    kernels.update_scale_(
        scale,
        growth_tracker,
        any_found,
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
        scaler._min_scale,
    )
    scaler._watch.look(scale, any_found)


def _stuck(skipped: int, min_scale: float) -> str:
    return (
        f"the loss scale is down at min_scale ({min_scale:g}) and the last {skipped} steps were skipped all the same: "
        "the gradients hold inf or nan that come from no scale, and training stands still. Ask "
        "nonfinite_parameters(optimizer) after step(optimizer) which ones; common causes are nan in the inputs or the "
        "weights, and activations beyond 65504 in float16, for which bfloat16 has room; update(new_scale) starts anew"
    )


def _set_scale(scaler: GradScaler, scale: Tensor, new_scale: Any) -> None:
    if isinstance(new_scale, float):
        check_new_scale(new_scale)
        scale.fill_(max(new_scale, scaler._min_scale))
        return
    if new_scale.device.type != scaler._device or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
            "requires_grad=False."
        )
    there = torch.empty_like(scale).copy_(new_scale)
    if there.device.type == "cpu":
        check_new_scale(there.item())
    torch.where(there.isfinite(), there, scale, out=scale)
    scale.clamp_(min=scaler._min_scale)

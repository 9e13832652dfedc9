"""Bugs planted in torch.amp.GradScaler, on top of its public methods and of the hooks that others override."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from conformance.plants.catalogue import planted

SCALER = "amp.GradScaler"
Make = Callable[[Any], Any]


def broken(
    plant_id: str, says: str, thread: str = "own"
) -> Callable[[Callable[[Any], dict[str, Any]]], Make]:
    """Enter a subclass of the scaler with the members that `members(original)` returns."""

    def enter(members: Callable[[Any], dict[str, Any]]) -> Make:
        def make(original: Any) -> Any:
            # Under the original's name, by which a pickle finds it.
            place = {"__module__": original.__module__, "__qualname__": original.__qualname__}
            return type(original.__name__, (original,), {**place, **members(original)})

        return planted(f"grad_scaler.{plant_id}", breaks=SCALER, says=says, thread=thread)(make)

    return enter


def parameters(optimizer: Any) -> list[Any]:
    everything = (p for group in optimizer.param_groups for p in group["params"])
    # To ask a tensor that is no leaf for its gradient is to be warned.
    return [p for p in everything if getattr(p, "is_leaf", False) and p.grad is not None]


def sees(keep: Callable[[list[Any]], list[Any]]) -> Callable[[Any], dict[str, Any]]:
    """All gradients are unscaled, but only those that `keep` leaves are looked at for inf and nan."""

    def members(original: Any) -> dict[str, Any]:
        def _unscale_grads_(
            self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
        ) -> Any:
            kept = keep(parameters(optimizer))
            bad = any(not bool(p.grad.to_dense().isfinite().all()) for p in kept)
            found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
            for verdict in found.values():
                verdict.fill_(float(bad))
            return found

        return {"_unscale_grads_": _unscale_grads_}

    return members


broken("first_gradient_only", "only the first gradient is looked at", "facebookresearch/fairscale#890")(
    sees(lambda all_: all_[:1])
)
broken("last_gradient_missed", "the last gradient is not looked at")(sees(lambda all_: all_[:-1]))
broken("first_dtype_only", "only gradients of the first dtype are looked at")(
    sees(lambda all_: [p for p in all_ if p.grad.dtype == all_[0].grad.dtype])
)


@broken("last_group_missed", "the last group is neither unscaled nor looked at")
def last_group_missed(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        groups = optimizer.param_groups
        seen = types.SimpleNamespace(param_groups=groups[:-1] if len(groups) > 1 else groups)
        return original._unscale_grads_(self, seen, inv_scale, found_inf, allow_fp16)

    return {"_unscale_grads_": _unscale_grads_}


def judging(finite: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], dict[str, Any]]:
    """A gradient is not finite when `finite` says so, asked before it is unscaled."""

    def members(original: Any) -> dict[str, Any]:
        def _unscale_grads_(
            self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
        ) -> Any:
            bad = any(not bool(finite(p.grad.to_dense())) for p in parameters(optimizer))
            found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
            for verdict in found.values():
                verdict.fill_(float(bad))
            return found

        return {"_unscale_grads_": _unscale_grads_}

    return members


broken("nan_is_finite", "only inf is looked for")(judging(lambda grad: ~grad.isinf().any()))
broken("minus_inf_is_finite", "only nan and +inf are looked for")(
    judging(lambda grad: ~(grad.isnan().any() | grad.isposinf().any()))
)
broken("checks_the_sum", "the gradient's sum is looked at, which overflows where no element does")(
    judging(lambda grad: grad.sum().isfinite())
)
broken("last_element_missed", "a gradient's last element is not looked at")(
    judging(lambda grad: grad.reshape(-1)[:-1].isfinite().all())
)


@broken("checks_sparse_parts", "sparse float16 parts are looked at before their sum", "pytorch/pytorch#36786")
def checks_sparse_parts(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        parts = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters(optimizer)]
        bad = any(not bool(part.isfinite().all()) for part in parts)
        found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        for verdict in found.values():
            verdict.fill_(float(bad))
        return found

    return {"_unscale_grads_": _unscale_grads_}


@broken("sparse_left_scaled", "the values of sparse gradients stay scaled", "pytorch/pytorch#36786")
def sparse_left_scaled(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        for parameter in parameters(optimizer):
            if parameter.grad.is_sparse:
                parameter.grad._values().mul_(1 / float(inv_scale))
        return found

    return {"_unscale_grads_": _unscale_grads_}


@broken("half_precision_taken", "float16 gradients are taken in silence", "pytorch/pytorch#74739")
def half_precision_taken(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return original._unscale_grads_(self, optimizer, inv_scale, found_inf, True)

    return {"_unscale_grads_": _unscale_grads_}


@broken("coarse_reciprocal", "the scale's reciprocal is rounded to float16", "pytorch/pytorch#26512")
def coarse_reciprocal(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return original._unscale_grads_(self, optimizer, inv_scale.bfloat16().float(), found_inf, allow_fp16)

    return {"_unscale_grads_": _unscale_grads_}


@broken("reciprocal_one_ulp_off", "the reciprocal is off by its last bit", "pytorch/pytorch#26512")
def reciprocal_one_ulp_off(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        power = math.frexp(float(inv_scale))[0] == 0.5
        off = inv_scale if power else torch.nextafter(inv_scale, torch.zeros_like(inv_scale))
        return original._unscale_grads_(self, optimizer, off, found_inf, allow_fp16)

    return {"_unscale_grads_": _unscale_grads_}


@broken("overflow_left_scaled", "gradients are unscaled only when all are finite", "pytorch/pytorch#98772")
def overflow_left_scaled(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        before = [(p, p.grad.clone()) for p in parameters(optimizer)]
        found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        if any(float(verdict) for verdict in found.values()):
            for parameter, grad in before:
                if not grad.is_sparse:
                    parameter.grad.copy_(grad)
        return found

    return {"_unscale_grads_": _unscale_grads_}


@broken("gradients_replaced", "gradients are unscaled out of place")
def gradients_replaced(original: Any) -> dict[str, Any]:
    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        held = [(p.grad, p.grad.detach().clone()) for p in parameters(optimizer) if not p.grad.is_sparse]
        found = original._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        for parameter in parameters(optimizer):
            if not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.detach().clone()
        with torch.no_grad():
            for grad, before in held:
                grad.copy_(before)
        return found

    return {"_unscale_grads_": _unscale_grads_}


@broken(
    "steps_on_overflow",
    "the optimizer is called on zeroed gradients instead of skipped",
    "pytorch/pytorch#44511",
)
def steps_on_overflow(original: Any) -> dict[str, Any]:
    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not sum(float(found) for found in state["found_inf_per_device"].values()):
            return original._maybe_opt_step(self, optimizer, state, *args, **kwargs)
        for parameter in parameters(optimizer):
            parameter.grad.zero_()
        optimizer.step(*args, **kwargs)
        return None

    return {"_maybe_opt_step": _maybe_opt_step}


@broken("return_value_lost", "what the optimizer's step returns is lost", "pytorch/pytorch#67590")
def return_value_lost(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


@broken("rechecked_in_step", "step looks again although unscale_ has", "pytorch/pytorch#97415")
def rechecked_in_step(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            bad = any(not bool(p.grad.to_dense().isfinite().all()) for p in parameters(optimizer))
            for verdict in found.values():
                verdict.fill_(float(bad))
        return original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


@broken(
    "spoilt_after_unscaling",
    "an inf that comes after unscale_ is caught for some optimizers",
    "pytorch/pytorch#96755",
)
def spoilt_after_unscaling(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
            bad = any(not bool(p.grad.to_dense().isfinite().all()) for p in parameters(optimizer))
            for verdict in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                verdict.fill_(max(float(verdict), float(bad)))
        return original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


class Lending:
    """Wraps an aware optimizer's step to change what was laid on it."""

    def __init__(self, optimizer: Any, change: Callable[[Any], None]) -> None:
        self._optimizer, self._real = optimizer, optimizer.step
        self._change = change

    def __enter__(self) -> None:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._change(self._optimizer)
            return self._real(*args, **kwargs)

        self._optimizer.step = step

    def __exit__(self, *_: object) -> None:
        del self._optimizer.step


def laying(change: Callable[[Any, Any, bool], None]) -> Callable[[Any], dict[str, Any]]:
    """`change(scaler, optimizer, unscaled)` alters what an aware optimizer finds on itself."""

    def members(original: Any) -> dict[str, Any]:
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            aware = getattr(optimizer, "_step_supports_amp_scaling", False) and not hasattr(
                optimizer, "scalers"
            )
            if not aware or not self.is_enabled():
                return original.step(self, optimizer, *args, **kwargs)
            unscaled = self._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"
            with Lending(optimizer, lambda laid: change(self, laid, unscaled)):
                return original.step(self, optimizer, *args, **kwargs)

        return {"step": step}

    return members


def _scale_laid_again(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    if unscaled:
        optimizer.grad_scale = scaler._get_scale_async()


def _no_verdict_after_unscaling(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    if unscaled:
        optimizer.found_inf = torch.zeros_like(torch.as_tensor(optimizer.found_inf, dtype=torch.float32))


def _scale_never_laid(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    optimizer.grad_scale = None


broken(
    "unscaled_twice",
    "an aware optimizer gets the scale although unscale_ was called",
    "pytorch/pytorch#94060",
)(laying(_scale_laid_again))
broken(
    "no_verdict_after_unscaling",
    "after unscale_ an aware optimizer gets no found_inf",
    "pytorch/pytorch#95847",
)(laying(_no_verdict_after_unscaling))
broken("scale_never_laid", "an aware optimizer never gets the scale")(laying(_scale_never_laid))


@broken("laid_and_left", "grad_scale and found_inf stay on the optimizer")
def laid_and_left(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        seen: dict[str, Any] = {}

        def keep(laid: Any) -> None:
            seen.update(grad_scale=laid.grad_scale, found_inf=laid.found_inf)

        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "scalers"):
            return original.step(self, optimizer, *args, **kwargs)
        with Lending(optimizer, keep):
            result = original.step(self, optimizer, *args, **kwargs)
        vars(optimizer).update(seen)
        return result

    return {"step": step}


@broken(
    "aware_gradients_unscaled",
    "an aware optimizer's gradients are unscaled before it does",
    "pytorch/pytorch#98772",
)
def aware_gradients_unscaled(original: Any) -> dict[str, Any]:
    def _check_inf_per_device(self: Any, optimizer: Any) -> Any:
        found = original._check_inf_per_device(self, optimizer)
        for parameter in parameters(optimizer):
            parameter.grad.mul_(1.0 / self.get_scale())
        return found

    return {"_check_inf_per_device": _check_inf_per_device}


@broken("closures_taken", "a closure by keyword runs", "pytorch/pytorch#142472")
def closures_taken(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("closure", None)
        return original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


@broken(
    "no_gradients_steps",
    "an optimizer that has no gradients is stepped",
    "nerfstudio-project/nerfstudio#1919",
)
def no_gradients_steps(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and hasattr(optimizer, "param_groups") and not parameters(optimizer):
            return optimizer.step(*args, **kwargs)
        return original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


def after(method: str, change: Callable[[Any, Any], None]) -> Callable[[Any], dict[str, Any]]:
    """`change(scaler, optimizer)` runs when the method is through."""

    def members(original: Any) -> dict[str, Any]:
        def changed(self: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = () if method == "update" and optimizer is None else (optimizer,)
            result = getattr(original, method)(self, *given, *args, **kwargs)
            if self.is_enabled():
                change(self, optimizer)
            return result

        return {method: changed}

    return members


def _stage_reset(scaler: Any, optimizer: Any) -> None:
    states = scaler._per_optimizer_states
    states[id(optimizer)] = {**states[id(optimizer)], "stage": type(states[0]["stage"]).READY}
    states.pop(0)


broken("step_twice", "a second step without update is taken", "Azure/MS-AMP#45")(after("step", _stage_reset))
broken("unscale_twice", "a second unscale_ unscales again", "Lightning-AI/pytorch-lightning#4148")(
    after("unscale_", _stage_reset)
)


@broken("growth_to_infinity", "the scale grows beyond what float32 holds", "pytorch/pytorch#98828")
def growth_to_infinity(original: Any) -> dict[str, Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        before = self.get_scale()
        original.update(self, new_scale)
        if (
            self.is_enabled()
            and new_scale is None
            and self.get_scale() == before
            and self.state_dict()["_growth_tracker"] == 0
        ):
            self._scale.mul_(self.get_growth_factor())

    return {"update": update}


def moving(change: Callable[[Any, float, int, bool], None]) -> Callable[[Any], dict[str, Any]]:
    """`change(scaler, scale before, tracker before, was finite)` runs after each update without a new scale."""

    def members(original: Any) -> dict[str, Any]:
        def update(self: Any, new_scale: Any = None) -> None:
            if not self.is_enabled():
                return
            before, tracker = self.get_scale(), self.state_dict()["_growth_tracker"]
            states = self._per_optimizer_states.values()
            found = itertools.chain(*(state["found_inf_per_device"].values() for state in states))
            finite = not any(float(verdict) for verdict in found)
            original.update(self, new_scale)
            if new_scale is None:
                change(self, before, tracker, finite)

        return {"update": update}

    return members


def _count_kept_on_overflow(scaler: Any, before: float, tracker: int, finite: bool) -> None:
    if not finite:
        scaler._growth_tracker.fill_(tracker)


def _grows_each_time(scaler: Any, before: float, tracker: int, finite: bool) -> None:
    if finite:
        scaler._scale.fill_(before * scaler.get_growth_factor())


def _one_step_late(scaler: Any, before: float, tracker: int, finite: bool) -> None:
    if finite and tracker == scaler.get_growth_interval() - 1:
        scaler._scale.fill_(before)
        scaler._growth_tracker.fill_(tracker + 1)
    elif finite and tracker == scaler.get_growth_interval():
        scaler._scale.fill_(before * scaler.get_growth_factor())
        scaler._growth_tracker.fill_(0)


def _factors_swapped(scaler: Any, before: float, tracker: int, finite: bool) -> None:
    if not finite:
        scaler._scale.fill_(before / scaler.get_growth_factor())


def _count_kept_on_growth(scaler: Any, before: float, tracker: int, finite: bool) -> None:
    if finite and tracker + 1 == scaler.get_growth_interval():
        scaler._growth_tracker.fill_(1)


broken(
    "growth_count_survives_overflow",
    "an overflow does not start the count again",
    "deepspeedai/DeepSpeed#3553",
)(moving(_count_kept_on_overflow))
broken("grows_on_each_step", "the scale grows on every finite step", "pytorch/pytorch#33366")(
    moving(_grows_each_time)
)
broken("growth_one_step_late", "the scale grows one step after growth_interval")(moving(_one_step_late))
broken("factors_swapped", "the scale backs off by the reciprocal of growth_factor")(moving(_factors_swapped))
broken("growth_count_starts_at_one", "after growth the count goes on from one")(moving(_count_kept_on_growth))


@broken("last_optimizer_decides", "the scale follows the last optimizer's check alone")
def last_optimizer_decides(original: Any) -> dict[str, Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        if self.is_enabled() and new_scale is None:
            checked = [
                key for key, state in self._per_optimizer_states.items() if state["found_inf_per_device"]
            ]
            for key in checked[:-1]:
                del self._per_optimizer_states[key]
        original.update(self, new_scale)

    return {"update": update}


@broken("new_scale_aliased", "the tensor given to update becomes the scale itself", "pytorch/pytorch#109993")
def new_scale_aliased(original: Any) -> dict[str, Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        original.update(self, new_scale)
        if self.is_enabled() and isinstance(new_scale, torch.Tensor) and new_scale.dtype == torch.float32:
            self._scale = new_scale

    return {"update": update}


@broken("new_scale_resets_count", "a scale set by hand starts the count again")
def new_scale_resets_count(original: Any) -> dict[str, Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        original.update(self, new_scale)
        if self.is_enabled() and new_scale is not None:
            self._growth_tracker.fill_(0)

    return {"update": update}


@broken("update_forgives", "update without any check does nothing instead of raising")
def update_forgives(original: Any) -> dict[str, Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        try:
            original.update(self, new_scale)
        except AssertionError as error:
            if "No inf checks" not in str(error):
                raise

    return {"update": update}


def loading(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Loads what `change(scaler, state)` makes of a whole state."""

    def members(original: Any) -> dict[str, Any]:
        def load_state_dict(self: Any, state_dict: Any) -> None:
            whole = isinstance(state_dict, dict) and "_growth_tracker" in state_dict and self.is_enabled()
            original.load_state_dict(self, change(self, state_dict) if whole else state_dict)

        return {"load_state_dict": load_state_dict}

    return members


broken("tracker_not_loaded", "the count of finite steps is not loaded", "huggingface/accelerate#4289")(
    loading(lambda scaler, state: {**state, "_growth_tracker": scaler.state_dict()["_growth_tracker"]})
)
broken("used_scale_not_loaded", "a used scaler keeps its scale", "huggingface/accelerate#4289")(
    loading(lambda scaler, state: state if scaler._scale is None else {**state, "scale": scaler.get_scale()})
)
broken(
    "fresh_scale_not_loaded",
    "a fresh scaler starts from its own init_scale",
    "facebookresearch/fairseq2#1346",
)(
    loading(
        lambda scaler, state: state if scaler._scale is not None else {**state, "scale": scaler.get_scale()}
    )
)


@broken("state_lacks_an_entry", "state_dict forgets the count of finite steps", "allenai/tango#154")
def state_lacks_an_entry(original: Any) -> dict[str, Any]:
    def state_dict(self: Any) -> dict[str, Any]:
        return {key: value for key, value in original.state_dict(self).items() if key != "_growth_tracker"}

    return {"state_dict": state_dict}


@broken("state_of_tensors", "the state holds the live tensor instead of a number")
def state_of_tensors(original: Any) -> dict[str, Any]:
    def state_dict(self: Any) -> dict[str, Any]:
        state = original.state_dict(self)
        if state and self._scale is not None:
            state["scale"] = self._scale
        return state

    return {"state_dict": state_dict}


@broken("pickle_of_lambda", "an attribute that cannot be pickled is kept", "pytorch/pytorch#38296")
def pickle_of_lambda(original: Any) -> dict[str, Any]:
    def __getstate__(self: Any) -> Any:
        return {**original.__getstate__(self), "_fresh": lambda: {}}

    return {"__getstate__": __getstate__}


@broken("pickle_loses_the_count", "a pickle starts the count of finite steps again", "pytorch/pytorch#38296")
def pickle_loses_the_count(original: Any) -> dict[str, Any]:
    def __getstate__(self: Any) -> Any:
        state = original.__getstate__(self)
        return {**state, "_init_growth_tracker": 0} if self.is_enabled() else state

    return {"__getstate__": __getstate__}


@broken("loss_scaled_in_its_dtype", "a 0-dim float16 loss is scaled in float16", "pytorch/pytorch#76918")
def loss_scaled_in_its_dtype(original: Any) -> dict[str, Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original.scale(self, outputs)
        return (
            scaled.to(outputs.dtype)
            if isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
            else scaled
        )

    return {"scale": scale}


@broken("nested_scaled_twice", "what lies two lists deep is scaled twice")
def nested_scaled_twice(original: Any) -> dict[str, Any]:
    def scale(self: Any, outputs: Any) -> Any:
        if isinstance(outputs, list) and self.is_enabled():
            return [
                original.scale(self, original.scale(self, o) if isinstance(o, list) else o) for o in outputs
            ]
        return original.scale(self, outputs)

    return {"scale": scale}


@broken("generators_used_up", "generators come back as lists, all losses computed at once")
def generators_used_up(original: Any) -> dict[str, Any]:
    def scale(self: Any, outputs: Any) -> Any:
        if isinstance(outputs, types.GeneratorType) and self.is_enabled():
            return original.scale(self, list(outputs))
        return original.scale(self, outputs)

    return {"scale": scale}


@broken("off_still_checks", "a scaler that is switched off skips steps with inf")
def off_still_checks(original: Any) -> dict[str, Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() and any(not bool(p.grad.isfinite().all()) for p in parameters(optimizer)):
            return None
        return original.step(self, optimizer, *args, **kwargs)

    return {"step": step}


@broken("stale_verdict", "a verdict of the iteration before is carried into the third step")
def stale_verdict(original: Any) -> dict[str, Any]:
    def unscale_(self: Any, optimizer: Any) -> None:
        original.unscale_(self, optimizer)
        if not self.is_enabled():
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        earlier = vars(self).setdefault("_stale", {})
        times, bad = earlier.get(id(optimizer), (0, 0.0))
        now = max([float(verdict) for verdict in found.values()], default=0.0)
        if times == 2:
            for verdict in found.values():
                verdict.fill_(max(now, bad))
        earlier[id(optimizer)] = (times + 1, now)

    return {"unscale_": unscale_}

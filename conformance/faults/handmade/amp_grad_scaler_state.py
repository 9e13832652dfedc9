"""Faults in torch.amp.GradScaler: what it scales, and what is saved, pickled and loaded of it."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from conformance.faults.fault import Substitute, register_fault, subclass
from conformance.faults.handmade.amp_grad_scaler import broken


@broken(
    "loss_scaled_in_its_dtype", "scale", "a 0-dim float16 loss is scaled in float16", "pytorch/pytorch#76918"
)
def loss_scaled_in_its_dtype(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    is_loss = isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
    return scaled.to(outputs.dtype) if is_loss else scaled


@broken("nested_scaled_twice", "scale", "what lies two lists deep is scaled twice")
def nested_scaled_twice(original: Any, self: Any, outputs: Any) -> Any:
    if isinstance(outputs, list) and self.is_enabled():
        return [original(self, original(self, o) if isinstance(o, list) else o) for o in outputs]
    return original(self, outputs)


@broken("generators_used_up", "scale", "generators come back as lists, all losses computed at once")
def generators_used_up(original: Any, self: Any, outputs: Any) -> Any:
    if isinstance(outputs, types.GeneratorType) and self.is_enabled():
        return original(self, list(outputs))
    return original(self, outputs)


def loading(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Substitute:
    """Loads what `change(scaler, state)` makes of a whole state."""

    def fault(original: Any, self: Any, state_dict: Any) -> None:
        whole = isinstance(state_dict, dict) and "_growth_tracker" in state_dict and self.is_enabled()
        original(self, change(self, state_dict) if whole else state_dict)

    return fault


@broken(
    "tracker_not_loaded",
    "load_state_dict",
    "the count of finite steps is not loaded",
    "huggingface/accelerate#4289",
)
@loading
def tracker_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "_growth_tracker": scaler.state_dict()["_growth_tracker"]}


@broken(
    "used_scale_not_loaded", "load_state_dict", "a used scaler keeps its scale", "huggingface/accelerate#4289"
)
@loading
def used_scale_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    return state if scaler._scale is None else {**state, "scale": scaler.get_scale()}


@broken(
    "fresh_scale_not_loaded",
    "load_state_dict",
    "a fresh scaler starts from its own init_scale",
    "facebookresearch/fairseq2#1346",
)
@loading
def fresh_scale_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    return state if scaler._scale is not None else {**state, "scale": scaler.get_scale()}


@broken(
    "state_lacks_an_entry", "state_dict", "state_dict forgets the count of finite steps", "allenai/tango#154"
)
def state_lacks_an_entry(original: Any, self: Any) -> dict[str, Any]:
    return {key: value for key, value in original(self).items() if key != "_growth_tracker"}


@broken("state_of_tensors", "state_dict", "the state holds the live tensor instead of a number")
def state_of_tensors(original: Any, self: Any) -> dict[str, Any]:
    state = original(self)
    if state and self._scale is not None:
        state["scale"] = self._scale
    return state


@broken(
    "pickle_of_lambda",
    "__getstate__",
    "an attribute that cannot be pickled is kept",
    "pytorch/pytorch#38296",
)
def pickle_of_lambda(original: Any, self: Any) -> Any:
    return {**original(self), "_fresh": lambda: {}}


@broken(
    "pickle_loses_the_count",
    "__getstate__",
    "a pickle starts the count of finite steps again",
    "pytorch/pytorch#38296",
)
def pickle_loses_the_count(original: Any, self: Any) -> Any:
    state = original(self)
    return {**state, "_init_growth_tracker": 0} if self.is_enabled() else state


@broken(
    "factors_loaded_swapped", "load_state_dict", "growth and backoff factor are loaded the wrong way round"
)
@loading
def factors_loaded_swapped(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    grows, falls = state["growth_factor"], state["backoff_factor"]
    valid = isinstance(grows, float) and isinstance(falls, float) and grows > 1 > falls > 0
    return {**state, "growth_factor": 1 / falls, "backoff_factor": 1 / grows} if valid else state


@broken("interval_not_loaded", "load_state_dict", "growth_interval is not loaded", "allenai/tango#154")
@loading
def interval_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "growth_interval": scaler.get_growth_interval()}


@broken("loading_ends_iteration", "load_state_dict", "loading forgets what was called in this iteration")
def loading_ends_iteration(original: Any, self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    if self.is_enabled():
        self._per_optimizer_states.clear()


@broken("empty_state_taken", "load_state_dict", "an empty state is taken in silence")
def empty_state_taken(original: Any, self: Any, state_dict: Any) -> None:
    if state_dict != {}:
        original(self, state_dict)


@broken("off_refuses_states", "load_state_dict", "a scaler that is switched off refuses an empty state")
def off_refuses_states(original: Any, self: Any, state_dict: Any) -> None:
    if not self.is_enabled() and not state_dict:
        raise RuntimeError("The source state dict is empty.")
    original(self, state_dict)


@broken("refused_state_half_loaded", "load_state_dict", "of a state that is refused the factors are loaded")
def refused_state_half_loaded(original: Any, self: Any, state_dict: Any) -> None:
    try:
        original(self, state_dict)
    except Exception:
        if isinstance(state_dict, dict) and isinstance(state_dict.get("growth_factor"), float):
            self._growth_factor = state_dict["growth_factor"]
        raise


@broken("state_shared", "state_dict", "all states of a scaler are one dict, which changes with it")
def state_shared(original: Any, self: Any) -> dict[str, Any]:
    shared = vars(self).setdefault("_shared_state", {})
    shared.clear()
    shared.update(original(self))
    return shared


@broken(
    "pickle_in_iteration",
    "__getstate__",
    "pickles are taken in the middle of an iteration",
    "pytorch/pytorch#38296",
)
def pickle_in_iteration(original: Any, self: Any) -> Any:
    if not self.is_enabled():
        return original(self)
    states = dict(self._per_optimizer_states)
    self._per_optimizer_states.clear()
    try:
        return original(self)
    finally:
        self._per_optimizer_states.update(states)


@broken("pickle_loses_additions", "__getstate__", "what a subclass added is lost in a pickle")
def pickle_loses_additions(original: Any, self: Any) -> Any:
    state = original(self)
    fresh = type(self).__mro__[-2]("cpu", enabled=self.is_enabled())
    return {key: value for key, value in state.items() if hasattr(fresh, key)}


@broken("last_output_unscaled", "scale", "the last of several outputs is not scaled")
def last_output_unscaled(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    if self.is_enabled() and isinstance(outputs, (list, tuple)) and len(outputs) > 1:
        return type(scaled)([*scaled[:-1], outputs[-1]])
    return scaled


@broken("tuples_become_lists", "scale", "tuples of outputs come back as lists")
def tuples_become_lists(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    return list(scaled) if isinstance(scaled, tuple) and self.is_enabled() else scaled


@broken("loss_detached", "scale", "gradients do not flow through the scaled loss")
def loss_detached(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    return scaled.detach() if isinstance(scaled, torch.Tensor) and self.is_enabled() else scaled


@broken("outputs_overwritten", "scale", "outputs are scaled in their own memory")
def outputs_overwritten(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    dense = isinstance(outputs, torch.Tensor) and outputs.layout is torch.strided
    if dense and self.is_enabled() and outputs.is_floating_point() and not outputs.is_meta:
        outputs.data.copy_(scaled.data)
    return scaled


@broken("third_scale_stale", "scale", "from the third scaling on the loss is scaled by the first scale")
def third_scale_stale(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    if not self.is_enabled() or not isinstance(scaled, torch.Tensor) or self._scale is None:
        return scaled
    seen = vars(self).setdefault("_seen_scales", [])
    seen.append(float(self._scale))
    return scaled * (seen[0] / seen[-1]) if len(seen) > 2 and seen[-1] != seen[0] else scaled


@broken("double_loss_in_float32", "scale", "float64 outputs come back in float32")
def double_loss_in_float32(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    is_double = isinstance(scaled, torch.Tensor) and scaled.dtype == torch.float64 and self.is_enabled()
    return scaled.float() if is_double else scaled


def building(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Substitute:
    """The scaler is built with what `change(arguments by name)` makes of its arguments."""

    def fault(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        names = dict(bound.arguments)
        names.pop(next(iter(names)))
        original(self, **change(names))

    return fault


@broken("interval_truncated", "__init__", "a growth_interval that is no integer is cut off to one")
@building
def interval_truncated(given: dict[str, Any]) -> dict[str, Any]:
    interval = given.get("growth_interval")
    return {**given, "growth_interval": int(interval)} if isinstance(interval, float) else given


@broken("interval_zero_is_default", "__init__", "growth_interval=0 is taken for none given")
@building
def interval_zero_is_default(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "growth_interval" or value}


@broken("init_scale_truncated", "__init__", "fractions of init_scale are cut off")
@building
def init_scale_truncated(given: dict[str, Any]) -> dict[str, Any]:
    scale = given.get("init_scale")
    whole = isinstance(scale, float) and 1.0 < scale < 2.0**63
    return {**given, "init_scale": float(int(scale))} if whole else given


@broken("growth_of_one_taken", "__init__", "a growth_factor of exactly 1 is taken")
def growth_of_one_taken(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    one = kwargs.get("growth_factor") == 1.0
    original(self, *args, **({**kwargs, "growth_factor": 2.0} if one else kwargs))
    if one:
        self._growth_factor = 1.0


@broken("off_minds_numbers", "__init__", "a scaler that is switched off refuses a growth_factor of 1")
def off_minds_numbers(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if kwargs.get("growth_factor", 2.0) == 1.0:
        raise AssertionError("The growth factor must be > 1.0.")


@broken("missing_cuda_is_silent", "__init__", "without CUDA a scaler for it is switched off in silence")
def missing_cuda_is_silent(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        original(self, *args, **kwargs)


@register_fault(
    "grad_scaler.class_of_a_function",
    "amp.GradScaler",
    says="the class is made in a function, where no pickle finds it",
)
def class_of_a_function(original: Any) -> Any:
    return subclass(original, {"__qualname__": f"make.<locals>.{original.__qualname__}"})

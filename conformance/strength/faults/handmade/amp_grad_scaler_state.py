"""Faults in torch.amp.GradScaler: what it scales, and what is saved, pickled and loaded of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.amp_grad_scaler import broken


@broken(
    "loss_scaled_in_its_dtype", "scale", "a 0-dim float16 loss is scaled in float16", "pytorch/pytorch#76918"
)
def loss_scaled_in_its_dtype(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    is_loss = isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
    return scaled.to(outputs.dtype) if is_loss else scaled


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


@broken("interval_not_loaded", "load_state_dict", "growth_interval is not loaded", "allenai/tango#154")
@loading
def interval_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "growth_interval": scaler.get_growth_interval()}


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


@broken("outputs_overwritten", "scale", "outputs are scaled in their own memory")
def outputs_overwritten(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    dense = isinstance(outputs, torch.Tensor) and outputs.layout is torch.strided
    if dense and self.is_enabled() and outputs.is_floating_point() and not outputs.is_meta:
        outputs.data.copy_(scaled.data)
    return scaled

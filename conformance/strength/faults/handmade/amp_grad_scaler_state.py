"""Faults in torch.amp.GradScaler: scaled outputs, state dicts and pickles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.amp_grad_scaler import broken


@broken("scale", "pytorch/pytorch#76918")
def loss_scaled_in_its_dtype(original: Any, self: Any, outputs: Any) -> Any:
    """A 0-dim float16 loss is scaled in float16."""
    scaled = original(self, outputs)
    is_loss = isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
    return scaled.to(outputs.dtype) if is_loss else scaled


def loading(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Substitute:
    """Load the result of `change(scaler, state)` instead of a complete state."""

    @functools.wraps(change)
    def fault(original: Any, self: Any, state_dict: Any) -> None:
        whole = isinstance(state_dict, dict) and "_growth_tracker" in state_dict and self.is_enabled()
        original(self, change(self, state_dict) if whole else state_dict)

    return fault


@broken("load_state_dict", "huggingface/accelerate#4289")
@loading
def tracker_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The count of finite steps is not loaded."""
    return {**state, "_growth_tracker": scaler.state_dict()["_growth_tracker"]}


@broken("load_state_dict", "huggingface/accelerate#4289")
@loading
def used_scale_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A used scaler keeps its scale."""
    return state if scaler._scale is None else {**state, "scale": scaler.get_scale()}


@broken("load_state_dict", "facebookresearch/fairseq2#1346")
@loading
def fresh_scale_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A fresh scaler starts with its own init_scale."""
    return state if scaler._scale is not None else {**state, "scale": scaler.get_scale()}


@broken("state_dict", "allenai/tango#154")
def state_lacks_an_entry(original: Any, self: Any) -> dict[str, Any]:
    """The state dict lacks the count of finite steps."""
    return {key: value for key, value in original(self).items() if key != "_growth_tracker"}


@broken("state_dict")
def state_of_tensors(original: Any, self: Any) -> dict[str, Any]:
    """The state dict has the live tensor instead of a number."""
    state = original(self)
    if state and self._scale is not None:
        state["scale"] = self._scale
    return state


@broken("__getstate__", "pytorch/pytorch#38296")
def pickle_of_lambda(original: Any, self: Any) -> Any:
    """An attribute that cannot be pickled is kept."""
    return {**original(self), "_fresh": lambda: {}}


@broken("__getstate__", "pytorch/pytorch#38296")
def pickle_loses_the_count(original: Any, self: Any) -> Any:
    """The count of finite steps of an unpickled scaler is 0."""
    state = original(self)
    return {**state, "_init_growth_tracker": 0} if self.is_enabled() else state


@broken("load_state_dict", "allenai/tango#154")
@loading
def interval_not_loaded(scaler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """growth_interval is not loaded."""
    return {**state, "growth_interval": scaler.get_growth_interval()}


@broken("__getstate__", "pytorch/pytorch#38296")
def pickle_in_iteration(original: Any, self: Any) -> Any:
    """Pickling works in the middle of an iteration."""
    if not self.is_enabled():
        return original(self)
    states = dict(self._per_optimizer_states)
    self._per_optimizer_states.clear()
    try:
        return original(self)
    finally:
        self._per_optimizer_states.update(states)


@broken("scale")
def outputs_overwritten(original: Any, self: Any, outputs: Any) -> Any:
    """Outputs are scaled in place."""
    scaled = original(self, outputs)
    dense = isinstance(outputs, torch.Tensor) and outputs.layout is torch.strided
    if dense and self.is_enabled() and outputs.is_floating_point() and not outputs.is_meta:
        outputs.data.copy_(scaled.data)
    return scaled

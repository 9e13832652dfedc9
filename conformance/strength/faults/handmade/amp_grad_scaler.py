"""Helpers of the faults in torch.amp.GradScaler: registration, and a scaler's state of an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from conformance.strength.faults.fault import OWN, Decorator, fault_in, in_method

# The public methods that call those which subclasses override.
_CALLED_BY = {"_unscale_grads_": "unscale_", "_maybe_opt_step": "step", "_check_inf_per_device": "step"}


def broken(method: str, thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(original, scaler, ...)`, which replaces a method of the scaler."""
    part = f"amp.GradScaler.{_CALLED_BY.get(method, method)}"
    return fault_in("grad_scaler", "amp.GradScaler", functools.partial(in_method, method), thread, part=part)


def parameters(optimizer: Any) -> list[Any]:
    """Return the parameters that have a gradient."""
    everything = (p for group in optimizer.param_groups for p in group["params"])
    # torch warns if the gradient of a tensor that is not a leaf is read.
    return [p for p in everything if getattr(p, "is_leaf", False) and p.grad is not None]


def nonfinite(tensors: Iterable[Any]) -> bool:
    return any(not bool(p.grad.to_dense().isfinite().all()) for p in tensors)


def check_results(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return the scaler's flags of inf and nan, one tensor for each device."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def forget_stage(scaler: Any, optimizer: Any) -> None:
    """Make the scaler believe that nothing was called for this optimizer since the last update."""
    if scaler.is_enabled():
        states = scaler._per_optimizer_states
        states[id(optimizer)] = {**states[id(optimizer)], "stage": type(states[0]["stage"]).READY}
        states.pop(0)  # the entry that the lookup above has created


def unscales_by_itself(optimizer: Any) -> bool:
    """Return whether the optimizer unscales itself by attached tensors, not by an argument of its step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not hasattr(optimizer, "scalers")

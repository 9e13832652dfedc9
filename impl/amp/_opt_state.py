"""The order in which the methods of a `GradScaler` may be called, optimizer by optimizer."""

from __future__ import annotations

from enum import Enum
from typing import TypedDict

import torch
from torch import Tensor


class OptState(Enum):
    """How far one optimizer has come since the last `update`."""

    READY = 0
    """Its gradients, if any, are scaled."""
    UNSCALED = 1
    """Its gradients are unscaled and checked."""
    STEPPED = 2
    """Its step was taken or left out."""


_NEXT = {
    (OptState.READY, "unscale_"): OptState.UNSCALED,
    (OptState.READY, "step"): OptState.STEPPED,
    (OptState.UNSCALED, "step"): OptState.STEPPED,
}
_TWICE = "unscale_() has already been called on this optimizer since the last update()."
_REFUSED = {
    (OptState.UNSCALED, "unscale_"): _TWICE,
    (OptState.STEPPED, "unscale_"): "unscale_() is being called after step().",
    (OptState.STEPPED, "step"): "step() has already been called since the last update().",
}


def advance(stage: OptState, call: str) -> OptState:
    """The stage after `call`. `update` is no entry: it forgets the stages of all optimizers.

    Raises:
        RuntimeError: `call` may not come at this stage.
    """
    try:
        return _NEXT[stage, call]
    except KeyError:
        raise RuntimeError(_REFUSED[stage, call]) from None


class OptimizerState(TypedDict):
    """One optimizer since the last `update`."""

    stage: OptState
    found_inf_per_device: dict[torch.device, Tensor]


def refresh_per_optimizer_state() -> OptimizerState:
    """The state of an optimizer that no method has touched yet."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}

"""What a `GradScaler` knows of each optimizer: in which order its methods may be called, and what checks found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Found = dict[torch.device, Tensor]  # f32, 0-dim: 1.0 where there is inf or nan


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
    found_inf_per_device: Found


def refresh_per_optimizer_state() -> OptimizerState:
    """The state of an optimizer that no method has touched yet."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def stage_of(states: Mapping[int, OptimizerState], optimizer: torch.optim.Optimizer) -> OptState:
    state = states.get(id(optimizer))
    if state is None:
        return OptState.READY
    stage = state["stage"]
    # By name: others may have put torch's own OptState there.
    return stage if type(stage) is OptState else OptState[stage.name]


@dataclass(slots=True)
class CheckResults:
    """What was found about one optimizer, kept beyond `update`."""

    checked: Found | None = None  # by its last check
    here: Found | None = None  # the same, as far as this process's gradients tell
    stepped: Found | None = None  # by the check that its last step went by
    taken: bool | None = None  # that step, once the host knows
    low_precision_params: Sequence[
        Tensor
    ] = ()  # that have the gradients which were checked, where params have not

    def note(
        self, found: Found, here: Found, taken: bool | None, low_precision_params: Sequence[Tensor]
    ) -> None:
        """What a fused step found and did."""
        self.checked = self.stepped = found
        self.here, self.taken, self.low_precision_params = here, taken, low_precision_params

    def known(self) -> Found:
        """What its last check found."""
        if self.checked is None:
            raise RuntimeError(
                "this scaler has not checked the gradients of this optimizer; call unscale_(optimizer) or "
                "step(optimizer) before found_inf(optimizer)"
            )
        return self.checked

    def step_was_taken(self) -> bool:
        """Sync: one, where the host does not know yet."""
        if self.stepped is None:
            raise RuntimeError(
                "this scaler has not stepped this optimizer (or cannot know, if it takes no weak references); call "
                "step(optimizer) before step_was_taken(optimizer)"
            )
        if self.taken is None:
            self.taken = not any(flag.item() for flag in self.stepped.values())
        return self.taken


class KeptResults:
    """Check results by optimizer, none of which they keep alive."""

    def __init__(self) -> None:
        self._by_optimizer: WeakKeyDictionary[torch.optim.Optimizer, CheckResults] = WeakKeyDictionary()

    def of(self, optimizer: torch.optim.Optimizer) -> CheckResults:
        try:
            return self._by_optimizer[optimizer]
        except KeyError:
            return self._by_optimizer.setdefault(optimizer, CheckResults())
        except TypeError:  # it allows no weak references: nothing is kept that could be told from another's
            return CheckResults()

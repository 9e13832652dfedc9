"""Records of a `GradScaler` about each optimizer: the allowed order of calls, and the results of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NotRequired, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from impl.amp._microbatch import Accumulation
from impl.optim._fused_updates import Served
from impl.optim._param_norms import UpdateNorms

FoundInf = dict[torch.device, Tensor]  # f32, 0-dim: 1.0 for inf or nan


class OptState(Enum):
    """Stage of one optimizer since the last `update`."""

    READY = 0
    """The gradients, if any, are scaled."""
    UNSCALED = 1
    """The gradients are unscaled and checked."""
    STEPPED = 2
    """The step was taken or skipped."""


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


def next_stage(stage: OptState, call: str) -> OptState:
    """Return the stage after `call`. There is no entry for `update`, which resets the stages of all optimizers.

    Raises:
        RuntimeError: `call` is not allowed at this stage.
    """
    try:
        return _NEXT[stage, call]
    except KeyError:
        raise RuntimeError(_REFUSED[stage, call]) from None


class OptimizerState(TypedDict):
    """State of one optimizer since the last `update`."""

    stage: OptState
    found_inf_per_device: FoundInf
    accumulation: NotRequired[Accumulation]  # torch's states have none


def refresh_per_optimizer_state() -> OptimizerState:
    """Return the state of an optimizer on which no method was called yet."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def stage_of(states: Mapping[int, OptimizerState], optimizer: torch.optim.Optimizer) -> OptState:
    state = states.get(id(optimizer))
    if state is None:
        return OptState.READY
    stage = state["stage"]
    # Compare by name, because the user may have stored torch's own OptState.
    return stage if type(stage) is OptState else OptState[stage.name]


@dataclass(frozen=True, kw_only=True)
class FusedStepResult:
    """Norm, inf/nan flags and outcome of a fused step."""

    norm: Tensor  # norm of the unscaled gradients
    norms: Sequence[Tensor] | None  # norm of each unscaled gradient, if kept
    local_found_inf: FoundInf  # flags of this process's gradients
    global_found_inf: FoundInf  # flags of all processes, which decide
    taken: bool | None  # unknown to the host if None
    served: Sequence[Served]  # empty if the host has skipped all updates
    update_norms: UpdateNorms | None  # norms of weights and updates, if kept


@dataclass(slots=True)
class CheckResults:
    """Results of one optimizer's last check and step, which outlive `update`."""

    global_found_inf: FoundInf | None = None  # flags of the last check, over all processes
    local_found_inf: FoundInf | None = None  # flags of the last check, of this process's gradients
    step_found_inf: FoundInf | None = None  # flags that decided the last step
    taken: bool | None = None  # the last step's outcome, unknown to the host if None
    # Copies that hold the checked gradients of parameters without a gradient.
    low_precision_params: Sequence[Tensor] = ()
    served: Sequence[Served] = ()  # backends of the last fused step that the host did not skip
    accumulation: Accumulation | None = None  # microbatches of the current or last step
    norms: Sequence[Tensor] | None = None  # norms of single gradients that the last fused step has kept
    norm_type: float = 2.0  # order of these norms
    update_norms: UpdateNorms | None = None  # norms of weights and updates

    def record_fused_step(
        self, result: FusedStepResult, low_precision_params: Sequence[Tensor], norm_type: float
    ) -> None:
        self.global_found_inf = self.step_found_inf = result.global_found_inf
        self.local_found_inf, self.taken = result.local_found_inf, result.taken
        self.low_precision_params = low_precision_params
        self.record_backends_and_norms(result, norm_type)

    def record_backends_and_norms(self, result: FusedStepResult, norm_type: float) -> None:
        self.served = result.served or self.served
        self.norms, self.norm_type, self.update_norms = result.norms, norm_type, result.update_norms

    def last_check(self) -> FoundInf:
        """Return the flags of the last check, or raise if there was none."""
        if self.global_found_inf is None:
            raise RuntimeError(
                "this scaler has not checked the gradients of this optimizer; call unscale_(optimizer) or "
                "step(optimizer) before found_inf(optimizer)"
            )
        return self.global_found_inf

    def step_was_taken(self) -> bool:
        """Return whether the last step was taken. Sync: one, unless the host knows already."""
        if self.step_found_inf is None:
            raise RuntimeError(
                "this scaler has not stepped this optimizer (or cannot know, if it takes no weak references); call "
                "step(optimizer) before step_was_taken(optimizer)"
            )
        if self.taken is None:
            self.taken = not any(flag.item() for flag in self.step_found_inf.values())
        return self.taken


class KeptResults:
    """Check results of each optimizer, held by weak references to the optimizers."""

    def __init__(self) -> None:
        self._by_optimizer: WeakKeyDictionary[torch.optim.Optimizer, CheckResults] = WeakKeyDictionary()

    def items(self) -> list[tuple[torch.optim.Optimizer, CheckResults]]:
        return list(self._by_optimizer.items())

    def of(self, optimizer: torch.optim.Optimizer) -> CheckResults:
        try:
            return self._by_optimizer[optimizer]
        except KeyError:
            return self._by_optimizer.setdefault(optimizer, CheckResults())
        except TypeError:
            # Without weak references, results could be mistaken for those of another optimizer, so keep none.
            return CheckResults()

"""Faults in torch.amp.GradScaler: updates of the scale and of the count of finite steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.amp_grad_scaler import broken


@broken("update", "pytorch/pytorch#98828")
def growth_to_infinity(original: Any, self: Any, new_scale: Any = None) -> None:
    """The scale grows beyond the range of float32."""
    before = self.get_scale()
    original(self, new_scale)
    if not self.is_enabled() or new_scale is not None:
        return
    if self.get_scale() == before and self.state_dict()["_growth_tracker"] == 0:
        self._scale.mul_(self.get_growth_factor())


def moving(change: Callable[[Any, float, int, bool], None]) -> Substitute:
    """Call `change(scaler, scale before, count before, was finite)` after each update without a new scale."""

    @functools.wraps(change)
    def fault(original: Any, self: Any, new_scale: Any = None) -> None:
        if not self.is_enabled():
            return
        before, count = self.get_scale(), self.state_dict()["_growth_tracker"]
        states = self._per_optimizer_states.values()
        finite = not any(
            float(check_result) for state in states for check_result in state["found_inf_per_device"].values()
        )
        original(self, new_scale)
        if new_scale is None:
            change(self, before, count, finite)

    return fault


@broken("update", "deepspeedai/DeepSpeed#3553")
@moving
def growth_count_survives_overflow(scaler: Any, before: float, count: int, finite: bool) -> None:
    """An overflow does not reset the count of finite steps."""
    if not finite:
        scaler._growth_tracker.fill_(count)


@broken("update", "pytorch/pytorch#33366")
@moving
def grows_on_each_step(scaler: Any, before: float, count: int, finite: bool) -> None:
    """The scale grows in every finite step."""
    if finite:
        scaler._scale.fill_(before * scaler.get_growth_factor())


@broken("update", "pytorch/pytorch#109993")
def new_scale_aliased(original: Any, self: Any, new_scale: Any = None) -> None:
    """A tensor that is passed to `update` becomes the scale itself."""
    original(self, new_scale)
    if self.is_enabled() and isinstance(new_scale, torch.Tensor) and new_scale.dtype == torch.float32:
        self._scale = new_scale


@broken("update", "pytorch/pytorch#109993")
@moving
def scale_replaced(scaler: Any, before: float, count: int, finite: bool) -> None:
    """The scale is a new tensor after each update."""
    scaler._scale = scaler._scale.clone()


@broken("update", "pytorch/pytorch#109993")
def new_scale_with_gradient(original: Any, self: Any, new_scale: Any = None) -> None:
    """A new scale that requires grad is accepted."""
    original(self, new_scale.detach() if isinstance(new_scale, torch.Tensor) else new_scale)

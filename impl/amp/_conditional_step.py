"""A step of any optimizer that happens or not by a flag on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.kernels import untracked


@untracked
def step_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> bool | None:
    """Call `optimizer.step()`; where `found_inf` is 1.0, parameters and states are put back as they were.

    What is put back is copied first, which takes as much memory again and two more passes over it. The host has to know
    the flag, and the step is not called where it is set, while a parameter has no states yet, and for states that lie
    on the host (step counters of optimizers that are not `capturable`).

    Returns:
        Whether the step was taken, None where the host does not know.
    Sync: none, but for those states.
    """
    held = _held(optimizer)
    if held is None:
        taken = not found_inf.item()
        if taken:
            optimizer.step()
        return taken
    before = [tensor.clone() for tensor in held]
    optimizer.step()
    for tensor, old in zip(held, before, strict=True):
        tensor.copy_(torch.where(found_inf.to(tensor.device, non_blocking=True) != 0, old, tensor))
    return None


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    """All that a step changes; None where that cannot be told, or is not on a device."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    values: list[Any] = [*params]
    for param in params:
        state = optimizer.state.get(param)
        if not state:
            return None
        values += state.values()
    kept = [value for value in values if isinstance(value, Tensor)]
    if len(kept) < len(values) or any(value.device != params[0].device for value in kept):
        return None
    return kept

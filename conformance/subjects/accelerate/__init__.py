"""accelerate's clipping: what `Accelerator.clip_grad_norm_` does where nothing but DTensors tells of sharding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator

from conformance.subjects.package_source import refuse


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """It uses nothing of the accelerator, which would set this process up for training. It has no `foreach`."""
    refuse(error_if_nonfinite=error_if_nonfinite)
    return Accelerator._clip_grad_norm_dtensor_aware(None, list(parameters), max_norm, norm_type=norm_type)

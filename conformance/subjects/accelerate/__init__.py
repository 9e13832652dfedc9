"""accelerate's clipping: `Accelerator.clip_grad_norm_` if only DTensors show that parameters are sharded."""

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
    """Call accelerate's method without an accelerator, which would set up this process for training.

    The method has no argument `foreach`.
    """
    refuse(error_if_nonfinite=error_if_nonfinite)
    return Accelerator._clip_grad_norm_dtensor_aware(None, list(parameters), max_norm, norm_type=norm_type)

"""DeepSpeed's clipping, run from its source on one CPU rank, because its import looks for compilers and devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace

import torch

from conformance.subjects.package_source import Instead, definitions, refuse

_ALONE = Instead(
    objects={
        "get_accelerator": lambda: SimpleNamespace(
            current_device_name=lambda: "cpu", FloatTensor=torch.FloatTensor
        ),
        "groups": SimpleNamespace(_get_data_parallel_group=lambda: None),
        "inf": math.inf,
        # Data-parallel ranks, whose norms it averages, are this one.
        "dist": SimpleNamespace(get_world_size=lambda group: 1, all_reduce=lambda tensor, group: None),
    }
)

_CLIPPING = definitions("deepspeed", "deepspeed/runtime/utils.py", ["clip_grad_norm_"], _ALONE)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Call DeepSpeed's function, whose own fourth argument is a group of model-parallel ranks. It has no `foreach`."""
    refuse(error_if_nonfinite=error_if_nonfinite)
    return _CLIPPING.clip_grad_norm_(parameters, max_norm, norm_type)

"""megatron-core's clipping in float32, run from its source on the CPU instead of `cuda`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.subjects.package_source import Instead, definitions, refuse


def _all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    """Reduce over a group of model-parallel ranks. None means no reduction here, instead of all ranks."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)


_TEXTS = {"cuda": "cpu", "torch.cuda.FloatTensor": "torch.FloatTensor"}
_UTILS = definitions(
    "megatron-core",
    "megatron/core/utils.py",
    [
        "get_data_parallel_group_if_dtensor",
        "local_multi_tensor_applier",
        "local_multi_tensor_l2_norm",
        "local_multi_tensor_scale",
        "to_local_if_dtensor",
    ],
    Instead(
        objects={"HAVE_DTENSOR": True, "DTensor": DTensor},
        texts=_TEXTS,
    ),
)
_CLIPPING = definitions(
    "megatron-core",
    "megatron/core/optimizer/clip_grads.py",
    ["clip_grad_by_total_norm_fp32", "get_grad_norm_fp32"],
    Instead(
        objects={
            "get_data_parallel_group_if_dtensor": _UTILS.get_data_parallel_group_if_dtensor,
            "l2_norm_impl": _UTILS.local_multi_tensor_l2_norm,
            "multi_tensor_applier": _UTILS.local_multi_tensor_applier,
            "multi_tensor_scale_impl": _UTILS.local_multi_tensor_scale,
            "to_local_if_dtensor": _UTILS.to_local_if_dtensor,
            "torch.distributed.all_reduce": _all_reduce,
        },
        texts=_TEXTS,
    ),
)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip like megatron-core's optimizers: compute the norm, then scale the gradients. There is no `foreach`."""
    refuse(error_if_nonfinite=error_if_nonfinite)
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = _CLIPPING.get_grad_norm_fp32(
        [parameter.grad for parameter in listed if parameter.grad is not None], norm_type
    )
    _CLIPPING.clip_grad_by_total_norm_fp32(listed, max_norm, norm)
    return torch.tensor(norm)

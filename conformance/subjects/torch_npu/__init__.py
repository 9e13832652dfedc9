"""torch_npu's gradient scalers, run from their source on the CPU instead of the NPU.

Pinned memory and the error codes at the end of exception texts are left out.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _MultiDeviceReplicator

from conformance.subjects.package_source import Instead, definitions


def _instead(**objects: Any) -> Instead:
    return Instead(
        objects={
            "ErrCode": _NoCode(),
            "pta_error": lambda code: "",
            "torch.npu.FloatTensor": torch.FloatTensor,
            **objects,
        },
        texts={"npu": "cpu"},
        attributes={"is_npu": "is_cpu"},
        left_out=["pin_memory"],
    )


class _NoCode:
    def __getattr__(self, name: str) -> None:
        return None


_SCALER = definitions(
    "torch_npu",
    "torch_npu/npu/amp/grad_scaler.py",
    ["GradScaler", "_NpuMultiDeviceReplicator"],
    _instead(
        **{
            "amp_definitely_not_available": lambda: False,
            # As on every NPU since the Atlas A2: infinities show in the gradients, not in a flag of the device.
            "torch_npu.npu.utils.is_support_inf_nan": lambda: True,
        }
    ),
).GradScaler


class GradScaler(_SCALER):
    """Scaler with the first argument `device`, which torch added when it supported several devices."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled=enabled)


ShardedGradScaler = definitions(
    "torch_npu",
    "torch_npu/npu/amp/sharded_grad_scaler.py",
    [
        "_GeneralMultiDeviceReplicator",
        "_ShardedGradScaler",
        "_is_supported_device",
        "_refresh_per_optimizer_state",
    ],
    _instead(
        GradScaler=GradScaler,
        OptState=OptState,
        _MultiDeviceReplicator=_MultiDeviceReplicator,
        log=logging.getLogger("torch_npu"),
        npu_check_overflow=lambda gradient: not bool(gradient.isfinite().all()),
    ),
)._ShardedGradScaler

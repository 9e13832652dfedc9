"""What one fused step of a scaler does to memory: the kernels that it launches, and torch's operators beside them."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from impl import kernels
from impl.amp import GradScaler

NUMEL = 5000


class Passes(NamedTuple):
    launched: list[str]  # kernels, in their order
    operators: list[str]  # torch's, that were given as many elements as a parameter has
    reads: int  # values that the host took from a tensor


def of_fused_step(optimizer: str, copies: torch.dtype | None) -> Passes:
    """Of a step of the steady state, with clipping, of parameters in float32, by Triton's kernels."""
    from triton.runtime.interpreter import GridExecutor  # noqa: PLC0415  for the interpreter's process alone

    params = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(3)]
    narrow = [torch.ones(NUMEL, dtype=copies) for _ in params] if copies else []
    stepped: Any = getattr(torch.optim, optimizer)(params, lr=0.125)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    launched: list[str] = []
    real = GridExecutor.__call__

    def launch(self: Any, *args: Any, **more: Any) -> None:
        launched.append(self.fn.__name__)
        real(self, *args, **more)

    with kernels.backend("triton"), mock.patch.object(GridExecutor, "__call__", launch):
        for param in params:
            param.grad = torch.ones(NUMEL)
        for _ in range(2):  # the first one makes states, the second one moves counters together
            scaler.fused_step(stepped, max_norm=1.0, low_precision_params=narrow)
        launched.clear()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            scaler.fused_step(stepped, max_norm=1.0, low_precision_params=narrow)
    events = list(profiled.events() or [])
    return Passes(
        launched,
        [
            event.name
            for event in events
            if any(NUMEL in shape for shape in event.input_shapes if isinstance(shape, list))
        ],
        sum(event.name == "aten::_local_scalar_dense" for event in events),
    )

"""Kernels that one public call launches, and torch's operators beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from impl import kernels
from impl.amp import GradScaler
from impl.nn.utils import clip_grad_norm_

NUMEL = 5000


class Passes(NamedTuple):
    launched: list[str]  # kernels, in their order
    operators: list[str]  # torch's, that were given as many elements as a parameter has
    reads: int  # values that the host took from a tensor


def of_fused_step(optimizer: str, copies: torch.dtype | None) -> Passes:
    """Return the passes of a fused step with Triton's kernels: steady state, clipping, float32 parameters."""
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
        for _ in range(2):  # step 1 creates states, step 2 packs the counters
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


# Operators that launch nothing on a device.
_QUIET = {"aten::empty", "aten::empty_strided", "aten::to", "aten::_to_copy", "aten::unbind", "aten::zeros"}
_KERNEL = "kernel "


def launched_by(call: str, dtype: torch.dtype) -> list[str]:
    """Return the launches of a call in the steady state: Triton's kernels and torch's operators."""
    from triton.runtime.interpreter import GridExecutor  # noqa: PLC0415  for the interpreter's process alone

    params = [torch.nn.Parameter(torch.ones(NUMEL, dtype=dtype)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.AdamW(params)
    calls: dict[str, Callable[[], object]] = {
        "clip_grad_norm_": lambda: clip_grad_norm_(params, 1.0),
        "fused_step": lambda: scaler.fused_step(optimizer, max_norm=1.0),
        "fused_step that keeps norms": lambda: scaler.fused_step(optimizer, max_norm=1.0, keep_norms=True),
        "unscale_": lambda: scaler.unscale_(optimizer),
    }
    real = GridExecutor.__call__

    def launch(self: Any, *args: Any, **more: Any) -> None:
        with record_function(_KERNEL + self.fn.__name__):
            real(self, *args, **more)

    with kernels.backend("triton"), mock.patch.object(GridExecutor, "__call__", launch):
        for _ in range(2):  # call 1 creates tables and states, call 2 packs the counters
            calls[call]()
            if call == "unscale_":
                scaler.update(1.0)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            calls[call]()
    return [
        event.name.removeprefix(_KERNEL).removeprefix("aten::")
        for event in profiled.events() or []
        if _may_launch(event.name) and not _is_part_of_another(event)
    ]


def _may_launch(name: str) -> bool:
    return name.startswith(_KERNEL) or (name.startswith("aten::") and name not in _QUIET)


def _is_part_of_another(event: Any) -> bool:
    parent = event.cpu_parent
    # The process of the interpreter has memory filled that is not initialised. Views launch nothing.
    return parent is not None and (
        parent.name in {"aten::empty", "aten::unbind"}
        or _may_launch(parent.name)
        or _is_part_of_another(parent)
    )

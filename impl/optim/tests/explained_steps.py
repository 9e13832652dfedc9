"""Fused steps of which both the explanation and the functions that ran are recorded, for any process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from impl import kernels
from impl.amp import GradScaler
from impl.kernels import fused_step as public

# Functions that update, by backend. The first argument after the rule and library that they have is `Parameters`.
_BACKENDS = {"native": "fused_step", "cpu_blocked": "_step_cpu_blocked", "torch": "_step_by_torch"}


@contextlib.contextmanager
def recording(record: list[tuple[str, int]]) -> Iterator[None]:
    """Context manager that records the backend and the number of parameters of each update that ran."""

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if result is not False:
                parameters = next(arg for arg in args if hasattr(arg, "params"))
                record.append((name, len(parameters.params)))
            return result

        return spied

    with contextlib.ExitStack() as stack:
        for backend, name in _BACKENDS.items():
            real = getattr(public, name)
            stack.enter_context(mock.patch.object(public, name, spy(backend, real)))
        if kernels._dispatch.requested_backend() == "triton":
            from impl.kernels._triton import fused_step as triton  # noqa: PLC0415  optional

            launch = spy("triton", triton.launch_fused_step)
            stack.enter_context(mock.patch.object(triton, "launch_fused_step", launch))
        yield


def explained_and_run(
    backend: Any, copies: str = ""
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], str]:
    """Step float32 and float64 parameters.

    Args:
        backend: the requested backend.
        copies: "alike" or "mixed" for low-precision copies of one dtype or of two.

    Returns:
        The backends and numbers of parameters that `explain` reports, those that ran, and the explanation.
    """
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    params.append(torch.nn.Parameter(torch.ones(4, dtype=torch.float64)))
    optimizer = torch.optim.AdamW(params, lr=0.125)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.ones_like(param)
    low_precision_params = [param.detach().bfloat16() for param in params] if copies else []
    if copies == "mixed":
        low_precision_params[0] = low_precision_params[0].half()
    ran: list[tuple[str, int]] = []
    with kernels.backend(backend), recording(ran):
        scaler.fused_step(optimizer, low_precision_params=low_precision_params)
    explanation = scaler.explain(optimizer)
    explained: dict[str, int] = {}
    for parameter in explanation.parameters:
        explained[parameter.backend] = explained.get(parameter.backend, 0) + 1
    counted: dict[str, int] = {}
    for name, number in ran:
        counted[name] = counted.get(name, 0) + number
    return sorted(explained.items()), sorted(counted.items()), str(explanation)

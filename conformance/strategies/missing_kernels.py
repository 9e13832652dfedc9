"""Kernels that torch lacks on a device, measured by trying torch once: what the judge does without them.

torch's operator for unscaling has no kernel for bfloat16 on CUDA, and its fused Adagrad does not step there. Without a
reference no outcome could be compared, so the judge replaces them. The deviation `grad_scaler.bfloat16_on_cuda` covers
the difference itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.optim import SGD, Adagrad

from conformance.judge.library import Library
from conformance.judge.outcome import Raised, observe

_NAME = "_amp_foreach_non_finite_check_and_unscale_"
_operator = getattr(torch, _NAME)


@functools.cache
def refusal_of_bfloat16(device: str) -> Raised | None:
    """Return the error of torch's unscale operator for bfloat16 gradients on `device`, or None if it supports them."""
    grad, found_inf, inv_scale = (
        torch.ones(1, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32, torch.float32)
    )
    raised = observe(getattr(torch, _NAME), [grad], found_inf, inv_scale).raised
    return raised if raised is not None and raised.kind is NotImplementedError else None


@functools.cache
def refuses_bfloat16(library: Library, device: str) -> bool:
    """Return whether the library's scaler raises for bfloat16 gradients on `device` exactly what torch raises."""
    refusal = refusal_of_bfloat16(device)
    if refusal is None or not library.provides("amp.GradScaler"):
        return False
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=device))
    parameter.grad = torch.ones_like(parameter)

    def unscale() -> None:
        scaler = library.amp.GradScaler(device)
        scaler.scale(torch.zeros((), device=device))
        scaler.unscale_(SGD([parameter], lr=0.125))

    return observe(unscale).raised == refusal


def replaced_for(library: Library, device: str) -> AbstractContextManager[Any]:
    """Context manager in which torch's unscale operator supports bfloat16, if the library refuses it as torch does.

    A library that unscales bfloat16 on `device` itself does not get the replacement.
    """
    return mock.patch.object(torch, _NAME, _unscale_) if refuses_bfloat16(library, device) else nullcontext()


def _unscale_(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Run torch's operator, on the CPU for bfloat16 gradients."""
    if grads[0].dtype is not torch.bfloat16:
        _operator(grads, found_inf, inv_scale)
        return
    on_host, flag = [grad.cpu() for grad in grads], found_inf.cpu()
    _operator(on_host, flag, inv_scale.cpu())
    for grad, unscaled in zip(grads, on_host, strict=True):
        grad.copy_(unscaled)
    found_inf.copy_(flag)


@functools.cache
def steps_fused_adagrad(device: str) -> bool:
    """Return whether torch steps `Adagrad(fused=True)` with parameters on `device`."""
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.ones_like(parameter)
    return observe(lambda: Adagrad([parameter], fused=True).step()).raised is None


def fused_adagrad(params: Iterable[Any], **settings: Any) -> Adagrad:
    """Return a fused Adagrad, or a plain one that also counts steps on the device if torch refuses a fused one."""
    params = list(params)
    first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
    if steps_fused_adagrad(first.device.type):
        return Adagrad(params, fused=True, **settings)
    optimizer = Adagrad(params, **settings)
    for param, state in optimizer.state.items():
        state["step"] = state["step"].to(param.device)
    return optimizer

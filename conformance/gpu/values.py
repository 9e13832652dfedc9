"""Ten mixed-precision steps beside torch's on the same gradients, of which one step has an inf.

The scale falls at that step and grows at others, so all rules of the scaler take part. If torch's unscale operator does
not support bfloat16 on the device, the reference runs it on the CPU, and the rest of its steps on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import SEED, member
from conformance.gpu.bandwidth import limit_threads
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.judge.library import load_library
from conformance.judge.tolerances import norm_of
from conformance.strategies.missing_kernels import refusal_of_bfloat16, replaced_for

STEPS, INF_STEP = 10, 4
_TENSORS = 30
_NUMEL = {"cuda": 40_000, "cpu": 4_000}  # elements of each tensor
_SCALE, _GROWTH_INTERVAL, _MAX_NORM = 1024.0, 3, 1.0
# Bounds on the distance of a tensor's parameters from torch's, relative to their norm.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


class Trained:
    """Parameters, optimizer and scaler of one library. The parameters are the same each time."""

    def __init__(self, subject: str, dtype: torch.dtype, device: str, **settings: Any) -> None:
        draw = torch.Generator(device).manual_seed(SEED)
        self.params = [
            torch.nn.Parameter(_drawn(_NUMEL[device], draw).mul_(0.01).to(dtype)) for _ in range(_TENSORS)
        ]
        self.optimizer = torch.optim.AdamW(self.params, fused=True, **settings)
        self.scaler = member(subject, "amp.GradScaler")(
            device, init_scale=_SCALE, growth_interval=_GROWTH_INTERVAL
        )
        self.scaler.scale(torch.ones((), device=device))  # makes the scaler's tensors
        self._clip = member(subject, "nn.utils.clip_grad_norm_")

    def four_calls(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        norm = self._clip(self.params, _MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def fused_step(self) -> Tensor:
        if not hasattr(self.scaler, "fused_step"):
            raise NotImplementedError(f"{type(self.scaler).__module__} has no fused_step")
        return self.scaler.fused_step(self.optimizer, max_norm=_MAX_NORM)

    def scale_and_growth(self) -> tuple[float, int]:
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


METHODS: dict[str, Callable[[Trained], Tensor]] = {
    "fused_step": Trained.fused_step,
    "four calls": Trained.four_calls,
}


def _drawn(numel: int, draw: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=draw, device=draw.device)


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    rows.run(
        {
            f"{name} {str(dtype).removeprefix('torch.')}": partial(_judged, task, method, dtype)
            for dtype in BOUNDS
            for name, method in METHODS.items()
        }
    )


def _judged(task: PhaseTask, method: Callable[[Trained], Tensor], dtype: torch.dtype) -> Result:
    values = compared(task.subject, method, dtype, task.device)
    says = "; ".join(values["faults"]) or f"parameters apart by {values['parameters_apart']:.1e}"
    if dtype is torch.bfloat16 and refusal_of_bfloat16(task.device):
        says += " from torch's, which is unscaled on the CPU"
    return "failed" if values["faults"] else "agrees", says, values


def compared(
    subject: str, method: Callable[[Trained], Tensor], dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Return distances of the subject's steps from torch's four calls. "faults" lists those beyond a bound."""
    subject_run, torchs = Trained(subject, dtype, device), Trained("torch", dtype, device)
    draw = torch.Generator(device).manual_seed(SEED)
    faults: list[str] = []
    scales: list[tuple[float, float]] = []
    for step in range(STEPS):
        give_grads(subject_run, torchs, draw, has_inf=step == INF_STEP)
        norm = method(subject_run)
        with replaced_for(load_library("torch"), device):
            expected_norm = torchs.four_calls()
        excess = norm_of(_TENSORS * _NUMEL[device], _TENSORS).excess(expected_norm, norm)
        if step != INF_STEP and excess is not None:
            faults.append(f"norm of step {step}: {excess}")
        state, expected_state = subject_run.scale_and_growth(), torchs.scale_and_growth()
        if state != expected_state:
            faults.append(f"scale and growth tracker after step {step}: {state}, torch {expected_state}")
        scales.append((state[0], expected_state[0]))
    apart = max(map(relative_distance, subject_run.params, torchs.params))
    if not apart <= BOUNDS[dtype]:
        faults.append(f"parameters apart by {apart:.1e}, bound {BOUNDS[dtype]:.0e}")
    return {"faults": faults, "parameters_apart": apart, "scales": scales}


def give_grads(subject_run: Trained, torchs: Trained, draw: torch.Generator, has_inf: bool = False) -> None:
    for place, (param, other) in enumerate(zip(subject_run.params, torchs.params, strict=True)):
        grad = _drawn(param.numel(), draw).to(param.dtype).mul_(_SCALE)
        if has_inf and place == _TENSORS // 2:
            grad[-1] = math.inf
        param.grad, other.grad = grad, grad.clone()


def relative_distance(param: Tensor, expected: Tensor) -> float:
    difference = param.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


if __name__ == "__main__":
    serve(work)

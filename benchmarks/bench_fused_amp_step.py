"""Fused AMP step: unscale, clip, step and update in one call, against torch's four calls.

torch has no such call. The reference is its scaler with its fused AdamW, the fastest combination on every device. A
second benchmark compares with the foreach AdamW, which is torch's default on CUDA. Foreach rounds bfloat16 after every
pass, so only float32 is compared there. The compiled step is in bench_optimizer.

The four calls unscale and clip the gradients in place and the fused call does not. So only parameters are compared.
"""

import functools
from collections.abc import Callable

import torch

from benchmarks import comparison
from benchmarks.common import DEVICES, DTYPES, GRADIENTS, HEADLINES, SHAPES, SUBJECTS, scaler_of, training
from benchmarks.timing import Workload


def step_call(
    subject: str, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], device: str
) -> Callable[[], torch.Tensor]:
    """Return the subject's fused step, or torch's four calls that do the same. Both return the norm."""
    scaler = scaler_of(subject, device)
    if subject != "torch" and not hasattr(scaler, "fused_step"):
        raise NotImplementedError(f"{subject} has no fused_step")

    def four_calls() -> torch.Tensor:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm

    def one_call() -> torch.Tensor:
        return scaler.fused_step(optimizer, max_norm=1.0)

    return four_calls if subject == "torch" else one_call


def fused_amp_step(
    subject: str, shapes: str, dtype: str, gradients: str, device: str, implementation: str = "fused"
) -> Workload:
    data = training(shapes, dtype, device)
    optimizer = data.optimizer
    if subject == "torch" and implementation == "foreach":
        optimizer = torch.optim.AdamW(data.parameters, lr=1e-4, foreach=True)
    call = step_call(subject, optimizer, data.parameters, device)

    def effect() -> list[torch.Tensor]:
        optimizer.state.clear()
        return data.effect_on_parameters(call)

    prepare = data.renew if gradients == "renewed" else None
    return Workload(call, prepare, effect)


class RatioFusedAmpStep(comparison.MemoryBound):
    title = "Fused AMP step"
    area = "Fused AMP step"
    params = [list(SHAPES), DTYPES, GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    # Gradients are read twice. Parameters and two moments are read and written.
    passes = 8
    workload = staticmethod(fused_amp_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFusedAmpStepToForeach(comparison.Ratio):
    title = "Fused AMP step, against torch's foreach AdamW"
    area = "Fused AMP step"
    params = [HEADLINES, ["float32"], ["kept"], DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    workload = staticmethod(functools.partial(fused_amp_step, implementation="foreach"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FusedAmpStep(comparison.Absolute):
    title = "Fused AMP step"
    params = [SUBJECTS, HEADLINES, DTYPES, ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "gradients", "device"]
    workload = staticmethod(fused_amp_step)

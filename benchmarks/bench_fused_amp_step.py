"""The whole of a mixed-precision step in one call, against torch's four: unscale, clip, step, update.

torch has no such call; the reference is its scaler with its fused AdamW, the fastest that it offers on every device.
Beside it stands the foreach one, which torch takes on CUDA where nobody chooses; that rounds bfloat16 after each of its
passes, so float32 alone is compared. The compiled step is in bench_optimizer.
The gradients that the four calls unscale and clip, the one call leaves: parameters alone are compared.
"""

import functools

import torch

from benchmarks import comparison
from benchmarks.common import DEVICES, DTYPES, GRADIENTS, HEADLINES, SHAPES, SUBJECTS, scaler_of, training
from benchmarks.timing import Workload


def fused_amp_step(
    subject: str, shapes: str, dtype: str, gradients: str, device: str, torchs: str = "fused"
) -> Workload:
    data = training(shapes, dtype, device)
    scaler = scaler_of(subject, device)
    if subject != "torch" and not hasattr(scaler, "fused_step"):
        raise NotImplementedError(f"{subject} has no fused_step")
    optimizer = data.optimizer
    if subject == "torch" and torchs == "foreach":
        optimizer = torch.optim.AdamW(data.parameters, lr=1e-4, foreach=True)

    def four_calls() -> torch.Tensor:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(data.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm

    def one_call() -> torch.Tensor:
        return scaler.fused_step(optimizer, max_norm=1.0)

    def effect() -> list[torch.Tensor]:
        optimizer.state.clear()
        return data.effect_on_parameters(call)

    call = four_calls if subject == "torch" else one_call
    prepare = data.renew if gradients == "renewed" else None
    return Workload(call, prepare, effect)


class RatioFusedAmpStep(comparison.Ratio):
    title = "Fused AMP step"
    area = "Fused AMP step"
    params = [list(SHAPES), DTYPES, GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    workload = staticmethod(fused_amp_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFusedAmpStepToForeach(comparison.Ratio):
    title = "Fused AMP step, torch's by foreach"
    area = "Fused AMP step"
    params = [HEADLINES, ["float32"], ["kept"], DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    workload = staticmethod(functools.partial(fused_amp_step, torchs="foreach"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FusedAmpStep(comparison.Absolute):
    title = "Fused AMP step"
    params = [SUBJECTS, HEADLINES, DTYPES, ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "gradients", "device"]
    workload = staticmethod(fused_amp_step)

"""The whole of a mixed-precision step in one call, against torch's four: unscale, clip, step, update.

torch has no such call; the reference is its scaler with its fused AdamW, the fastest that it offers on every device.
The gradients that the four calls unscale and clip, the one call leaves: parameters alone are compared.
"""

import torch

from benchmarks import comparison
from benchmarks.common import DEVICES, DTYPES, GRADIENTS, HEADLINES, SHAPES, SUBJECTS, scaler_of, training
from benchmarks.timing import Workload


def fused_amp_step(subject: str, shapes: str, dtype: str, gradients: str, device: str) -> Workload:
    data = training(shapes, dtype, device)
    scaler = scaler_of(subject, device)
    if subject != "torch" and not hasattr(scaler, "fused_step"):
        raise NotImplementedError(f"{subject} has no fused_step")

    def four_calls() -> torch.Tensor:
        scaler.unscale_(data.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(data.parameters, 1.0)
        scaler.step(data.optimizer)
        scaler.update()
        return norm

    def one_call() -> torch.Tensor:
        return scaler.fused_step(data.optimizer, max_norm=1.0)

    call = four_calls if subject == "torch" else one_call
    prepare = data.renew if gradients == "renewed" else None
    return Workload(call, prepare, effect=lambda: data.effect_on_parameters(call))


class RatioFusedAmpStep(comparison.Ratio):
    title = "Fused AMP step"
    params = [list(SHAPES), DTYPES, GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    workload = staticmethod(fused_amp_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FusedAmpStep(comparison.Absolute):
    title = "Fused AMP step"
    params = [SUBJECTS, HEADLINES, DTYPES, ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "gradients", "device"]
    workload = staticmethod(fused_amp_step)

"""AMP step after backward: `unscale_`, `clip_grad_norm_`, `step`, `update`.

The optimizer is torch's fused AdamW for every subject, so it takes the same time in both libraries.
"""

import torch

from benchmarks import comparison
from benchmarks.common import (
    DEVICES,
    DTYPES,
    GRADIENTS,
    HEADLINES,
    SHAPES,
    SUBJECTS,
    member,
    scaler_of,
    training,
)
from benchmarks.timing import Workload


def amp_step(subject: str, shapes: str, dtype: str, gradients: str, device: str) -> Workload:
    data = training(shapes, dtype, device)
    scaler = scaler_of(subject, device)
    clip = member(subject, "nn.utils.clip_grad_norm_")

    def call() -> torch.Tensor:
        scaler.unscale_(data.optimizer)
        norm = clip(data.parameters, 1.0)
        scaler.step(data.optimizer)
        scaler.update()
        return norm

    prepare = data.renew if gradients == "renewed" else None
    return Workload(call, prepare, effect=lambda: data.effect_on_step(call))


class RatioAmpStep(comparison.Ratio):
    title = "AMP step"
    area = "AMP step"
    params = [list(SHAPES), DTYPES, GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    workload = staticmethod(amp_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class AmpStep(comparison.Absolute):
    title = "AMP step"
    params = [SUBJECTS, HEADLINES, DTYPES, ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "gradients", "device"]
    workload = staticmethod(amp_step)

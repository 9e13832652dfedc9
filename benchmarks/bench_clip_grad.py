"""Gradient clipping. "clipped" scales the gradients, "unclipped" has gradients below the maximum norm."""

import torch

from benchmarks import comparison
from benchmarks.common import DEVICES, DTYPES, GRADIENTS, HEADLINES, SHAPES, SUBJECTS, member, training
from benchmarks.timing import Workload

# Gradients clipped to a positive norm need no clipping in the next call, and an implementation may skip the work. With
# a norm of -1, every call multiplies the gradients by a factor that converges to -1. So each call does the full work
# on gradients of the same size.
MAX_NORM = {"clipped": -1.0, "unclipped": 1e9}


def clip_grad_norm(
    subject: str, shapes: str, dtype: str, outcome: str, gradients: str, device: str
) -> Workload:
    data = training(shapes, dtype, device)
    clip = member(subject, "nn.utils.clip_grad_norm_")

    def call() -> torch.Tensor:
        return clip(data.parameters, MAX_NORM[outcome])

    prepare = data.renew if gradients == "renewed" else None
    return Workload(call, prepare, effect=lambda: data.effect_on_gradients(call))


def clip_grad_value(subject: str, shapes: str, dtype: str, device: str) -> Workload:
    data = training(shapes, dtype, device)
    clip = member(subject, "nn.utils.clip_grad_value_")

    def call() -> None:
        clip(data.parameters, 0.02)

    return Workload(call, effect=lambda: data.effect_on_gradients(call))


def total_norm(subject: str, shapes: str, dtype: str, norm_type: float, device: str) -> Workload:
    data = training(shapes, dtype, device)
    norm = member(subject, "nn.utils.get_total_norm")
    gradients = [parameter.grad for parameter in data.parameters]

    def call() -> torch.Tensor:
        return norm(gradients, norm_type)

    return Workload(call, effect=lambda: [call()])


class RatioClipGradNorm(comparison.MemoryBound):
    title = "clip_grad_norm_"
    # Version 1 clipped to 1.0, and nothing was left to clip after the first calls.
    version = "2"
    area = "Clipping"
    params = [list(SHAPES), DTYPES, ["clipped"], GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "outcome", "gradients", "device"]
    passes = 3  # read for the norm, scaled in place
    workload = staticmethod(clip_grad_norm)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioClipGradNormUnclipped(comparison.MemoryBound):
    title = "clip_grad_norm_ with nothing to clip"
    area = "Clipping"
    params = [HEADLINES, DTYPES, ["unclipped"], ["kept"], DEVICES]
    param_names = ["shapes", "dtype", "outcome", "gradients", "device"]
    passes = 1
    workload = staticmethod(clip_grad_norm)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioClipGradValue(comparison.MemoryBound):
    title = "clip_grad_value_"
    area = "Clipping"
    params = [HEADLINES, DTYPES, DEVICES]
    param_names = ["shapes", "dtype", "device"]
    passes = 2
    workload = staticmethod(clip_grad_value)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioTotalNorm(comparison.MemoryBound):
    title = "get_total_norm"
    area = "Clipping"
    params = [HEADLINES, DTYPES, [1.0, 2.0, float("inf")], DEVICES]
    param_names = ["shapes", "dtype", "norm_type", "device"]
    passes = 1
    workload = staticmethod(total_norm)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class ClipGradNorm(comparison.Absolute):
    title = "clip_grad_norm_"
    # Version 1 clipped to 1.0, and nothing was left to clip after the first calls.
    version = "2"
    params = [SUBJECTS, HEADLINES, DTYPES, ["clipped", "unclipped"], ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "outcome", "gradients", "device"]
    workload = staticmethod(clip_grad_norm)


class ClipGradValue(comparison.Absolute):
    title = "clip_grad_value_"
    params = [SUBJECTS, HEADLINES, DTYPES, DEVICES]
    param_names = ["subject", "shapes", "dtype", "device"]
    workload = staticmethod(clip_grad_value)


class TotalNorm(comparison.Absolute):
    title = "get_total_norm"
    params = [SUBJECTS, HEADLINES, DTYPES, [2.0], DEVICES]
    param_names = ["subject", "shapes", "dtype", "norm_type", "device"]
    workload = staticmethod(total_norm)

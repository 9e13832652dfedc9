"""Single calls of GradScaler: `scale`, `unscale_` and `update`."""

from typing import Any

import torch

from benchmarks import comparison
from benchmarks.common import DEVICES, DTYPES, GRADIENTS, HEADLINES, SHAPES, SUBJECTS, scaler_of, training
from benchmarks.timing import Workload


def unscale(subject: str, shapes: str, dtype: str, gradients: str, device: str) -> Workload:
    data = training(shapes, dtype, device)
    scaler = scaler_of(subject, device)
    scaler.unscale_(data.optimizer)

    def prepare() -> None:
        scaler.update()  # allows the next unscale_
        if gradients == "renewed":
            data.renew()

    def effect() -> list[torch.Tensor]:
        scaler.update(new_scale=4.0)
        gradients_after = data.effect_on_gradients(lambda: scaler.unscale_(data.optimizer))
        scaler.update(new_scale=1.0)
        scaler.unscale_(data.optimizer)
        return gradients_after

    return Workload(lambda: scaler.unscale_(data.optimizer), prepare, effect)


def scale(subject: str, outputs: str, device: str) -> Workload:
    scaler = scaler_of(subject, device)
    loss = torch.ones((), device=device)
    argument: Any = loss if outputs == "one loss" else [loss, [loss] * 7]
    return Workload(lambda: scaler.scale(argument))


def update(subject: str, device: str) -> Workload:
    data = training("16x1k", "float32", device)
    scaler = scaler_of(subject, device)
    return Workload(scaler.update, prepare=lambda: scaler.unscale_(data.optimizer))


class RatioUnscale(comparison.MemoryBound):
    title = "GradScaler.unscale_"
    area = "GradScaler"
    params = [list(SHAPES), DTYPES, GRADIENTS, DEVICES]
    param_names = ["shapes", "dtype", "gradients", "device"]
    passes = 2
    workload = staticmethod(unscale)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioScale(comparison.Ratio):
    title = "GradScaler.scale"
    area = "GradScaler"
    params = [["one loss", "eight in a list"], DEVICES]
    param_names = ["outputs", "device"]
    workload = staticmethod(scale)

    def setup_cache(self):
        return self.measure_all()


class RatioUpdate(comparison.Ratio):
    title = "GradScaler.update"
    area = "GradScaler"
    params = [DEVICES]
    param_names = ["device"]
    workload = staticmethod(update)

    def setup_cache(self):
        return self.measure_all()


class Unscale(comparison.Absolute):
    title = "GradScaler.unscale_"
    params = [SUBJECTS, HEADLINES, DTYPES, ["kept"], DEVICES]
    param_names = ["subject", "shapes", "dtype", "gradients", "device"]
    workload = staticmethod(unscale)


class Scale(comparison.Absolute):
    title = "GradScaler.scale"
    params = [SUBJECTS, ["one loss", "eight in a list"], DEVICES]
    param_names = ["subject", "outputs", "device"]
    workload = staticmethod(scale)


class Update(comparison.Absolute):
    title = "GradScaler.update"
    params = [SUBJECTS, DEVICES]
    param_names = ["subject", "device"]
    workload = staticmethod(update)

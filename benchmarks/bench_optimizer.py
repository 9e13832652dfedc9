"""Step of an optimizer captured by impl, against the same optimizer without capture.

`against` is the implementation in torch. impl captures the fused one if torch has it.
"""

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import comparison
from benchmarks.common import (
    DEVICES,
    GRADIENTS,
    HEADLINES,
    SHAPES,
    SUBJECTS,
    TrainingTensors,
    member,
    some_of,
    training,
)
from benchmarks.timing import Workload

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-4, "fused": True},
    "SGD": {"lr": 1e-4, "momentum": 0.9, "fused": True},
    "Adagrad": {"lr": 1e-4, "fused": True},
    "RMSprop": {"lr": 1e-4, "foreach": True},
}


def optimizer_of(subject: str, data: TrainingTensors, name: str, **options: Any) -> torch.optim.Optimizer:
    optimizer = getattr(torch.optim, name)(data.parameters, **options)
    return optimizer if subject == "torch" else member(subject, "optim.capture")(optimizer)


def work(
    data: TrainingTensors, optimizer: torch.optim.Optimizer, step: Callable[[], Any], gradients: str
) -> Workload:
    def effect() -> list[torch.Tensor]:
        before = [parameter.detach().clone() for parameter in data.parameters]
        optimizer.state.clear()
        step()
        after = some_of(data.parameters)
        with torch.no_grad():
            torch._foreach_copy_(data.parameters, before)
        return after

    return Workload(step, data.renew if gradients == "renewed" else None, effect)


def step(subject: str, shapes: str, against: str, gradients: str, device: str) -> Workload:
    data = training(shapes, "float32", device)
    options = {"fused": True} if subject != "torch" or against == "fused" else {"foreach": True}
    optimizer = optimizer_of(subject, data, "AdamW", lr=1e-4, **options)
    return work(data, optimizer, optimizer.step, gradients)


def other_step(subject: str, name: str, shapes: str, device: str) -> Workload:
    data = training(shapes, "float32", device)
    optimizer = optimizer_of(subject, data, name, **OPTIMIZERS[name])
    return work(data, optimizer, optimizer.step, "renewed")


def changing_step(subject: str, shapes: str, device: str) -> Workload:
    """Give the first parameter a gradient only in every second step, so that cached lists never fit."""
    data = training(shapes, "float32", device)
    optimizer = optimizer_of(subject, data, "AdamW", lr=1e-4, fused=True)
    gradients = itertools.cycle([None, data.parameters[0].grad])

    def prepare() -> None:
        data.parameters[0].grad = next(gradients)

    workload = work(data, optimizer, optimizer.step, "kept")
    return Workload(workload.call, prepare, workload.effect)


def compiled_step(subject: str, shapes: str, device: str) -> Workload:
    """Capture impl's optimizer and compile torch's, which takes a minute for 100 tensors and needs a compiler."""
    if device == "cpu" and shutil.which("c++") is None:
        raise NotImplementedError("no C++ compiler")
    data = training(shapes, "float32", device)
    optimizer = optimizer_of(
        subject, data, "AdamW", lr=1e-4, **({} if subject == "torch" else {"fused": True})
    )
    call: Callable[[], Any] = torch.compile(optimizer.step) if subject == "torch" else optimizer.step
    return work(data, optimizer, call, "kept")


class RatioCapturedStep(comparison.MemoryBound):
    title = "optimizer.step, captured"
    area = "Captured optimizer"
    params = [list(SHAPES), ["fused", "foreach"], GRADIENTS, DEVICES]
    param_names = ["shapes", "against", "gradients", "device"]
    # Gradients are read. Parameters and two moments are read and written.
    passes = 7
    workload = staticmethod(step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioCapturedOther(comparison.Ratio):
    title = "optimizer.step of other optimizers, captured"
    area = "Captured optimizer"
    params = [["SGD", "Adagrad", "RMSprop"], ["1000x1k"], DEVICES]
    param_names = ["optimizer", "shapes", "device"]
    workload = staticmethod(other_step)

    def setup_cache(self):
        return self.measure_all()


class RatioCapturedChanging(comparison.Ratio):
    title = "optimizer.step, captured, with other gradients in each step"
    area = "Captured optimizer"
    params = [["1000x1k"], DEVICES]
    param_names = ["shapes", "device"]
    workload = staticmethod(changing_step)

    def setup_cache(self):
        return self.measure_all()


class RatioCapturedAgainstCompiled(comparison.Ratio):
    title = "optimizer.step, captured, against torch.compile"
    area = "Captured optimizer"
    params = [["1x1k", "100x1k"], DEVICES]
    param_names = ["shapes", "device"]
    workload = staticmethod(compiled_step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class CapturedStep(comparison.Absolute):
    title = "optimizer.step, captured"
    params = [SUBJECTS, HEADLINES, ["fused"], ["kept"], DEVICES]
    param_names = ["subject", "shapes", "against", "gradients", "device"]
    workload = staticmethod(step)

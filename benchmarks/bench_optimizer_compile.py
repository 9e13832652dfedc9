"""Optimizer step under `torch.compile`: the first step with its tracing, and later steps.

The backend "eager" runs the traced graph unchanged, so the times are those of tracing and of the guards.
"""

import contextlib
import functools
from collections.abc import Callable

import torch

from benchmarks import comparison
from benchmarks.common import SUBJECTS, member, training
from benchmarks.timing import Workload

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-4, foreach=True),
}
SIZES = ["1x1k", "100x1k"]


def tracing(subject: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if subject == "torch" else member(subject, "dynamo.installed")()


class Step:
    """A step of an optimizer, compiled at its first call."""

    def __init__(self, subject: str, optimizer: str, shapes: str, device: str) -> None:
        self._subject, data = subject, training(shapes, "float32", device)
        self.optimizer = OPTIMIZERS[optimizer](data.parameters)
        self.take = torch.compile(self.optimizer.step, backend="eager")

    def compile(self) -> None:
        # All optimizers share one step function, and the limit counts per function.
        with tracing(self._subject), torch._dynamo.config.patch(recompile_limit=1_000):
            self.take()

    def forget(self) -> None:
        torch._dynamo.reset()
        self.optimizer.state.clear()


def cold(subject: str, optimizer: str, shapes: str, device: str) -> Workload:
    step = Step(subject, optimizer, shapes, device)
    return Workload(step.compile, prepare=step.forget)


def steady(subject: str, optimizer: str, shapes: str, device: str) -> Workload:
    step = Step(subject, optimizer, shapes, device)
    for _ in range(3):  # SGD has momentum from the second step on
        step.compile()
    return Workload(step.take)


class RatioOptimizerCompile(comparison.Ratio):
    title = "optimizer step, compiling"
    area, curve = "One-off work", "compiling"
    params = [list(OPTIMIZERS), SIZES[:1], ["cpu"]]
    param_names = ["optimizer", "shapes", "device"]
    is_one_off = True
    workload = staticmethod(cold)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 600


class RatioOptimizerCompiled(comparison.Ratio):
    title = "optimizer step, compiled"
    area = "Compiled optimizer"
    params = [list(OPTIMIZERS), SIZES, ["cpu"]]
    param_names = ["optimizer", "shapes", "device"]
    workload = staticmethod(steady)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 600


class OptimizerCompile(comparison.Absolute):
    title = "optimizer step, compiling"
    params = [SUBJECTS, list(OPTIMIZERS), SIZES[:1], ["cpu"]]
    param_names = ["subject", "optimizer", "shapes", "device"]
    workload = staticmethod(cold)
    repeat = (3, 10, 5.0)

"""A slowdown injected into impl: does the verdict on time find it? On CUDA it slows launches only."""

import functools
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

KERNELS = ("clamp_", "scale_", "total_norm", "unscale_")


def slow_kernels(times: float) -> None:
    """Make each kernel of this process take that many times as long, wherever impl has its name."""
    for public in ("amp", "nn.utils"):  # whose modules hold the kernels under names of their own
        importlib.import_module(f"impl.{public}")
    kernels = importlib.import_module("impl.kernels")
    slowed = {id(kernel): _slowed(kernel, times) for kernel in (getattr(kernels, name) for name in KERNELS)}
    modules = [module for name, module in sys.modules.items() if name.startswith("impl.")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in slowed:
                setattr(module, name, slowed[id(value)])


def _slowed(kernel: Callable[..., Any], times: float) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        made = kernel(*args, **kwargs)
        end = start + (time.perf_counter() - start) * times
        while time.perf_counter() < end:
            pass
        return made

    return call

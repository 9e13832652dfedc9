"""Slowdown of impl's kernels, to test that the speed verdict finds it. On CUDA it only slows launches."""

import functools
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

KERNELS = ("clamp_", "clip_", "total_norm", "unscale_")


def slow_kernels(times: float) -> None:
    """Multiply the time of each kernel in this process by `times`, in all modules of impl that import it."""
    # The modules that bind the kernels to names of their own must be imported before they can be patched.
    for public in ("amp", "nn.utils"):
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
        result = kernel(*args, **kwargs)
        end = start + (time.perf_counter() - start) * times
        while time.perf_counter() < end:
            pass
        return result

    return call

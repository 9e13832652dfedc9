"""Uses of the older autocast classes of torch.cuda.amp and torch.cpu.amp, which take other arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from conformance.judge.outcome import Outcome, observe
from conformance.strategies.regions import state

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((), {}),
    "disabled": ((False,), {}),
    "another dtype": ((True, torch.float16), {}),
    "bfloat16": ((), {"dtype": torch.bfloat16}),
    "an unsupported dtype": ((), {"dtype": torch.float32}),
    "no cache": ((), {"cache_enabled": False}),
}


def used_as_region(autocast: Any, arguments: str, on: Any = contextlib.nullcontext) -> Outcome:
    """Use the class as a region. Return its attributes, the state inside and after, and the warnings.

    The region is entered twice.
    """
    args, kwargs = ARGUMENTS[arguments]

    def run() -> Any:
        with on():
            region = autocast(*args, **kwargs)
            states = [region.device, region.fast_dtype, region._enabled, region._cache_enabled]
            for _ in range(2):
                with region as entered:
                    states += [state(), entered is region]
            return [*states, state()]

    return observe(run)


def used_as_decorator(
    autocast: Any, arguments: str, function: Any = None, on: Any = contextlib.nullcontext
) -> Outcome:
    args, kwargs = ARGUMENTS[arguments]

    def inside(x: int) -> Any:
        return x, state()

    def run() -> Any:
        with on():
            decorated = autocast(*args, **kwargs)(function or inside)
            # A built-in function takes no keyword arguments.
            second = decorated(2) if function else decorated(x=2)
            return decorated(1), second, decorated.__name__, state()

    return observe(run)

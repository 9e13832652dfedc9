"""What is asked of torch.cuda.amp.GradScaler and torch.cpu.amp.GradScaler alike, the older spellings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from conformance.library import Library
from conformance.outcome import Outcome, observe
from conformance.strategies.scaling import Rig

# Each parameter by itself, all by position and by name, and what is refused.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "init_scale": ((), {"init_scale": 8.0}),
    "growth_factor": ((), {"growth_factor": 3.0, "growth_interval": 1}),
    "backoff_factor": ((), {"backoff_factor": 0.25}),
    "growth_interval": ((), {"growth_interval": 2}),
    "enabled": ((), {"enabled": False}),
    "by position": ((8.0, 3.0, 0.25, 2, True), {}),
    "by position, off": ((8.0, 3.0, 0.25, 2, False), {}),
    "growth_factor of 1": ((), {"growth_factor": 1.0}),
    "backoff_factor of 1": ((), {"backoff_factor": 1.0}),
}


def older_story(library: Library, made: type, arguments: str, device: str) -> Iterator[Outcome]:
    """Construction with its warnings, then a few iterations."""
    args, kwargs = ARGUMENTS[arguments]
    rig = Rig(library, device)
    scalers: list[Any] = []

    def make() -> Any:
        scalers.append(made(*args, **kwargs))
        return scalers[0].is_enabled(), scalers[0].state_dict()

    yield observe(make)
    if scalers:
        rig.scaler = scalers[0]
        for last in (None, None, math.inf, None):
            yield from rig.iteration(last)
        yield observe(rig.scaler.get_scale)

"""Faults in `GradScaler.overlapped_step`, which torch lacks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from conformance.strength.faults.fault import Substitute, in_method, register_fault, subclass
from conformance.strength.faults.handmade.distributed_fsdp_sharded_grad_scaler import SCALER

OVERLAPPED = "overlapped_step"


def broken(fault_id: str, says: str) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, optimizer, max_norm)`, which replaces the method."""

    def enter(fault: Substitute) -> Substitute:
        def make(base: type) -> type:
            return in_method(OVERLAPPED, fault)(base) if hasattr(base, OVERLAPPED) else subclass(base, {})

        register_fault(f"overlapped_step.{fault_id}", SCALER, says=says, wants=OVERLAPPED, on_ranks=True)(
            make
        )
        return fault

    return enter


@broken("ignores_clipping", "the early updates stay although the gradients are clipped")
@contextlib.contextmanager
def ignores_clipping(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    del max_norm
    with original(self, optimizer) as step:
        yield step


class _Late:
    """Result of a step that updates nothing early."""

    early_numel = repeated_numel = 0
    norm: Any = None


@broken("late", "all parameters are updated after the backward")
@contextlib.contextmanager
def late(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    del original
    step = _Late()
    yield step
    step.norm = self.fused_step(optimizer, max_norm)


@broken("steps_after_exception", "an exception that leaves the region does not prevent the step")
@contextlib.contextmanager
def steps_after_exception(
    original: Any, self: Any, optimizer: Any, max_norm: float = math.inf
) -> Iterator[Any]:
    failure = None
    with original(self, optimizer, max_norm) as step:
        try:
            yield step
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure

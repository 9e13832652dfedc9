"""Interfaces that a unit uses of its root and of summoned parameters, and the settings of a root."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from impl.distributed.fsdp._engine.memory import Memory
from impl.distributed.fsdp._engine.order import Order
from impl.distributed.fsdp._engine.streams import DeviceEvent, Streams
from impl.distributed.fsdp._params.param_group import Unsharded


class IterationEnd(Enum):
    """Event that ends the iteration by reducing the remaining gradients."""

    LAST_BACKWARD = "the backward after set_is_last_backward(True)"
    USER = "finalize_backward()"


@dataclass
class StepSettings:
    """User settings for the next steps. They may be set before the root exists."""

    is_last_backward: bool = True  # COMPUTE waits for its gradients
    is_finalized_by_user: bool = False  # the user ends the iteration, instead of its last backward
    # Event that GATHER waits for in the next forward, instead of COMPUTE.
    post_optim_event: DeviceEvent | None = None


class RootContext(Protocol):
    """Context that the units of one root share. `Root` implements it."""

    streams: Streams
    memory: Memory
    order: Order[Any]
    settings: StepSettings

    @property
    def awaited_end(self) -> IterationEnd | None: ...
    @property
    def is_in_backward(self) -> bool: ...
    @property
    def accumulates_on_reduce_stream(self) -> bool: ...
    def is_in_forward(self) -> bool: ...
    def is_idle(self) -> bool:
        """Return whether no unit is in a forward or backward."""
        ...

    def is_root(self, unit: Any) -> bool: ...
    def handle_failed_backward(self) -> None: ...
    def begin_backward(self) -> None: ...
    def enter_forward(self, unit: Any) -> None: ...
    def exit_forward(self, unit: Any) -> None: ...
    def reshard_after_evaluation(self) -> None: ...
    def is_outermost_forward(self, unit: Any) -> bool: ...
    def abandon_forward(self, unit: Any) -> None: ...
    def wait_for_pinned_reads(self) -> None: ...
    def finalize_backward(self) -> None: ...
    def wait_for_gradients(self) -> None: ...


class SummonedParams(Protocol):
    """A group of the unit's parameters inside `summon_full_params`, on a rank that has the full parameters."""

    def use_unsharded_views(self, dtype: torch.dtype) -> Unsharded:
        """Register views with the values of the summoned parameters, for a forward or backward inside the context."""
        ...

    def check_backward(self, name: str) -> None:
        """Raise if the unit `name` cannot store the gradients of a backward."""

    def use_kept_views(self) -> None:
        """Register the summoned parameters again. Do nothing if they are registered."""

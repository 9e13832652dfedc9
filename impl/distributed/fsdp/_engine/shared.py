"""What a unit knows of others: of the root, and of what a user is shown of its parameters."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from impl.distributed.fsdp._engine.memory import Memory
from impl.distributed.fsdp._engine.order import Order
from impl.distributed.fsdp._engine.streams import Streams
from impl.distributed.fsdp._params.param_group import Unsharded


class Shared(Protocol):
    """What the units of one root have in common; `Root` is it."""

    streams: Streams
    memory: Memory
    order: Order[Any]

    @property
    def is_in_backward(self) -> bool: ...
    @property
    def adds_up_later(self) -> bool: ...
    def is_in_forward(self) -> bool: ...
    def is_idle(self) -> bool:
        """Whether no unit is in a forward or backward."""
        ...

    def is_root(self, unit: Any) -> bool: ...
    def handle_failed_backward(self) -> None: ...
    def begin_backward(self) -> None: ...
    def note_begun(self, unit: Any) -> None: ...
    def note_ended(self, unit: Any) -> None: ...
    def note_abandoned(self) -> None: ...
    def let_host_write(self) -> None: ...


class SummonedParams(Protocol):
    """A group of the unit's parameters inside `summon_full_params`, on a rank that is shown it."""

    def use_unsharded_views(self, dtype: torch.dtype) -> Unsharded:
        """Have the modules see views that have the values shown, for a forward or backward inside."""
        ...

    def refuse_backward(self, name: str) -> None:
        """Of the unit `name`, where it cannot leave its gradients."""

    def use_summoned_params(self) -> None:
        """Have them show what they did before; nothing if they still do."""

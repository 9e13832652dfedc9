"""What a unit knows of others: of the root, of the units beside it, and of what a user is shown of its parameters."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from impl.distributed.fsdp._buffers import Buffers
from impl.distributed.fsdp._flat_param import FlatParamHandle
from impl.distributed.fsdp._streams import Streams
from impl.distributed.fsdp._unsharded_buffer import UnshardedBuffer


class Shared(Protocol):
    """What the units of one root have in common; `Root` is it."""

    streams: Streams
    syncs: bool
    buffers: Buffers

    @property
    def is_in_backward(self) -> bool: ...
    def is_root(self, unit: Any) -> bool: ...
    def handle_failed_backward(self) -> None: ...
    def begin_backward(self) -> None: ...
    def note_begun(self, unit: Any) -> None: ...
    def note_ended(self, unit: Any) -> None: ...
    def note_abandoned(self) -> None: ...
    def next_in_forward(self, unit: Any) -> Any: ...
    def next_in_backward(self, unit: Any) -> Any: ...
    def shards_were_written(self) -> None: ...
    def admit(self, unit: Any) -> None: ...
    def note_resharded(self, unit: Any) -> None: ...
    def buffer(
        self, handle: FlatParamHandle, dtype: torch.dtype, is_lent: bool
    ) -> tuple[Tensor, list[Tensor]]: ...
    def keep_until_reduced(self, buffer: Tensor) -> None: ...


class SummonedParams(Protocol):
    """A flat parameter of the unit inside `summon_full_params`, on a rank that is shown it."""

    was_computed_with: bool

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedBuffer:
        """Have the modules see views that have the values shown, for a forward or backward inside."""
        ...

    def refuse_backward(self, name: str) -> None:
        """Of the unit `name`, where it cannot leave its gradients."""
        ...

    def use_summoned_params(self) -> None:
        """Have them show what they did before; nothing if they still do."""
        ...

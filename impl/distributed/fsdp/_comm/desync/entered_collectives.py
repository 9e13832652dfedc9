"""Collectives of a group that this rank has entered, and completion of those that only some ranks have entered.

When ranks differ, some already wait in a collective that the others will not enter. If they left it, the group's
counts would disagree, and the user's next collective would hang. So every rank describes the collective that it waits
in, and a rank that is not in it enters an equal one of zeros before it raises. The result is not used: all ranks raise.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.group_collectives import GroupMethod

# Time limit of an equal collective, which all other ranks have entered or will enter.
_COMPLETES = timedelta(seconds=10)


class EnteredCollectives:
    """The collectives of one group. The thread that issues them enters and leaves, the monitor closes and describes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._count = 0
        self._pending: tuple[Callable[..., dist.Work], Sequence[Any]] | None = None

    def enter(self, collective: Callable[..., dist.Work], arguments: Sequence[object]) -> bool:
        """Record that this rank is about to issue a collective. Return False if it must not, after `close`."""
        with self._lock:
            if not self._is_closed:
                self._count += 1
                self._pending = collective, arguments
            return not self._is_closed

    def leave(self) -> None:
        self._pending = None

    def close(self) -> None:
        """Refuse further collectives. `describe_pending` stays true as long as this rank waits where it is."""
        with self._lock:
            self._is_closed = True

    def describe_pending(self) -> str:
        """Return the number and the signature of the collective that this rank waits in, for `complete_pending`.

        The signature is null if the rank waits in no collective, or in one that no group method issues (a gather).
        """
        signature = None
        if (pending := self._pending) is not None and isinstance(pending[0], GroupMethod):
            signature = [pending[0].names, _described([*pending[1]])]
        return json.dumps([self._count, signature])

    def complete_pending(self, descriptions: Sequence[str], group: dist.ProcessGroup) -> None:
        """Enter collectives equal to those that other ranks wait in, until this rank has entered as many.

        Args:
            descriptions: what each rank's `describe_pending` returned after its `close`.
        """
        signatures: dict[int, list[Any]] = {}
        for count, signature in map(json.loads, descriptions):
            if signature is not None:
                signatures.setdefault(count, []).append(signature)
        # Different collectives under one number cannot all be completed.
        while (pending := signatures.get(self._count + 1)) and all(other == pending[0] for other in pending):
            self._count += 1
            names, arguments = pending[0]
            GroupMethod(*names)(group, *map(_zeros_like, arguments)).wait(_COMPLETES)


def _described(value: object) -> Any:
    """Return tensors as shape, dtype and device. Options of a collective are left out: they decide no size."""
    if isinstance(value, Tensor):
        return {
            "shape": [*value.shape],
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
        }
    if isinstance(value, list):
        items: list[Any] = value
        return [_described(item) for item in items if isinstance(item, Tensor | list | int)]
    return value


def _zeros_like(described: object) -> Any:
    if isinstance(described, dict):
        dtype = getattr(torch, described["dtype"])
        return torch.zeros(described["shape"], dtype=dtype, device=described["device"])
    return [_zeros_like(item) for item in described] if isinstance(described, list) else described

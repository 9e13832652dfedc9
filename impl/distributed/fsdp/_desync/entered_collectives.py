"""What this rank has entered of a group's collectives, and how ranks complete what only some of them have entered.

When ranks differ, some already wait in a collective that the others will not enter. If they left it, the group's
counts would disagree, and the user's next collective would hang. So every rank tells which collective it is in, and a
rank that is not in it enters an equal one, of zeros, before it raises. Its result is not used: all ranks raise.
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

from impl.distributed.fsdp._transport.group_collectives import GroupMethod

_COMPLETES = timedelta(seconds=10)  # an equal collective that all other ranks have entered or will enter


class EnteredCollectives:
    """The collectives of one group. The thread that issues them enters and leaves, the monitor closes and describes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._count = 0
        self._pending: tuple[Callable[..., dist.Work], Sequence[Any]] | None = None

    def enter(self, collective: Callable[..., dist.Work], arguments: Sequence[Any]) -> bool:
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
        """Return the number and the form of the collective that this rank waits in, for `complete_pending`.

        The form is null if the rank waits in none, or in one that no group method issues, such as a gather to one rank.
        """
        form = None
        if (pending := self._pending) is not None and isinstance(pending[0], GroupMethod):
            form = [pending[0].names, _form_of([*pending[1]])]
        return json.dumps([self._count, form])

    def complete_pending(self, descriptions: Sequence[str], group: dist.ProcessGroup) -> None:
        """Enter collectives equal to those that other ranks wait in, until this rank has entered as many.

        Args:
            descriptions: what each rank's `describe_pending` returned after its `close`.
        """
        forms: dict[int, list[Any]] = {}
        for count, form in map(json.loads, descriptions):
            if form is not None:
                forms.setdefault(count, []).append(form)
        # Collectives of several forms under one number cannot all be completed.
        while (entered := forms.get(self._count + 1)) and all(form == entered[0] for form in entered):
            self._count += 1
            names, arguments = entered[0]
            GroupMethod(*names)(group, *map(_value_of, arguments)).wait(_COMPLETES)


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {
            "shape": [*value.shape],
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
        }
    if isinstance(value, list):
        parts: list[Any] = value
        return [
            _form_of(part) for part in parts if isinstance(part, Tensor | list | int)
        ]  # options decide no size
    return value


def _value_of(form: Any) -> Any:
    if isinstance(form, dict):
        return torch.zeros(form["shape"], dtype=getattr(torch, form["dtype"]), device=form["device"])
    return [_value_of(part) for part in form] if isinstance(form, list) else form

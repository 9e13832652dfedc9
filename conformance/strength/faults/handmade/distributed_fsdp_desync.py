"""Faults in errors about ranks that diverge, and about lost ranks."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import OWN, Decorator, Substitute
from conformance.strength.faults.handmade.distributed_fsdp import broken, units

_GROUP = "(process_group)"
_PARTED = re.compile(r"rank (\d+) gathered '")
_LOST = re.compile(r"\brank \d+\b")
_LONGER_THAN_ANY_GROUP_S = 25.0


def reporting(thread: str = OWN, about: str = ".forward") -> Decorator:
    """Return a decorator of `fault(model, error)`, which is called if the outermost unit's forward raises."""

    def register(fault: Substitute) -> Substitute:
        @functools.wraps(fault)
        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except RuntimeError as error:
                if self.check_is_root():
                    return fault(self, error)
                raise

        return broken("forward", thread, about, on_ranks=False)(forward)

    return register


@reporting("pytorch/pytorch#75902")
def divergence_not_reported(model: Any, error: RuntimeError) -> Any:
    """Ranks that diverge raise nothing."""
    return torch.zeros(3, 2, requires_grad=True)


@reporting()
def divergence_of_wrong_ranks(model: Any, error: RuntimeError) -> Any:
    """The error of diverging ranks swaps their numbers."""
    raise RuntimeError(_PARTED.sub(lambda match: f"rank {1 - int(match[1])} gathered '", str(error)))


@reporting(about=_GROUP)
def lost_rank_not_named(model: Any, error: RuntimeError) -> Any:
    """The error does not name the lost rank."""
    raise RuntimeError(_LOST.sub("a rank", str(error)))


@reporting(about=_GROUP)
def lost_rank_reported_late(model: Any, error: RuntimeError) -> Any:
    """A lost rank is reported after the group's timeout."""
    time.sleep(_LONGER_THAN_ANY_GROUP_S)
    raise error


@broken("forward")
def orders_may_not_change(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A change of order is refused although all ranks make it."""
    if not self.check_is_root():
        return original(self, *args, **kwargs)
    ran: list[int] = []

    def note(number: int) -> Callable[..., None]:
        return lambda *_: ran.append(number)

    handles = [unit.register_forward_pre_hook(note(number)) for number, unit in enumerate(units(self))]
    output = original(self, *args, **kwargs)
    for handle in handles:
        handle.remove()
    if vars(self).setdefault("_faulty_order", ran[:]) != ran:
        raise RuntimeError(f"units ran in the order {ran}, and before in {self._faulty_order}")
    return output

"""Faults in what is said of ranks that part from the others, and of ranks that are lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.handmade.distributed_fsdp import OWN, broken, units

_GROUP = "(process_group)"
_PARTED = re.compile(r"rank (\d+) gathered '")
_LOST = re.compile(r"\brank \d+\b")
_LONGER_THAN_ANY_GROUP_S = 25.0


def telling(
    fault_id: str, says: str, thread: str = OWN, about: str = ".forward"
) -> Callable[[Callable[[Any, RuntimeError], Any]], Callable[[Any, RuntimeError], Any]]:
    """Enter `fault(model, error)`, which is called where the outermost unit's forward raises: it raises, or returns."""

    def enter(fault: Callable[[Any, RuntimeError], Any]) -> Callable[[Any, RuntimeError], Any]:
        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except RuntimeError as error:
                if self.check_is_root():
                    return fault(self, error)
                raise

        broken(fault_id, "forward", says, thread, about, on_ranks=False)(forward)
        return fault

    return enter


@telling("parting_never_reported", "ranks that part are not told", "pytorch/pytorch#75902")
def _(model: Any, error: RuntimeError) -> Any:
    return torch.zeros(3, 2, requires_grad=True)


@telling("parting_reported_of_wrong_ranks", "of ranks that part each is named in the other's place")
def _(model: Any, error: RuntimeError) -> Any:
    raise RuntimeError(_PARTED.sub(lambda match: f"rank {1 - int(match[1])} gathered '", str(error)))


@telling("lost_without_name", "which rank is lost is not told", about=_GROUP)
def _(model: Any, error: RuntimeError) -> Any:
    raise RuntimeError(_LOST.sub("a rank", str(error)))


@telling("lost_reported_late", "that a rank is lost is told after the group's time-out", about=_GROUP)
def _(model: Any, error: RuntimeError) -> Any:
    time.sleep(_LONGER_THAN_ANY_GROUP_S)
    raise error


@broken("orders_may_not_change", "forward", "ranks that change their order alike are refused")
def orders_may_not_change(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
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

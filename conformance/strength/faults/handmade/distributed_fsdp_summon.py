"""Faults in summon_full_params: what is whole inside, what is kept of it, where it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.distributed_fsdp import OWN, broken

_NAMES = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_SUMMON = "summon_full_params"
# `fault(summoned, module, options)`: `summoned(**options)` is the context as it should be.
Summoned = Callable[..., AbstractContextManager[None]]


def summoning(fault_id: str, says: str, thread: str = OWN) -> Callable[[Substitute], Substitute]:
    """Enter a fault that is a context itself: a generator function of one `yield`."""

    def enter(fault: Substitute) -> Substitute:
        context = contextlib.contextmanager(fault)

        def framed(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(zip(_NAMES, args, strict=False)) | kwargs

            def summoned(**changed: Any) -> AbstractContextManager[None]:
                return original(module, **options | changed)

            return context(summoned, module, {"writeback": True, **options})

        broken(fault_id, _SUMMON, says, thread)(framed)
        return fault

    return enter


@summoning("writeback_lost", "what is written inside is lost", "pytorch/pytorch#107081")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with summoned():
        yield
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            if parameter.shape == value.shape:
                parameter.copy_(value)


@summoning(
    "both_writeback_and_rank0_only",
    "writeback is not refused with rank0_only, and means nothing",
    "pytorch/pytorch#93938",
)
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with summoned(writeback=options["writeback"] and not options.get("rank0_only")):
        yield


@summoning("summoned_in_use", "it is not refused where parameters are in use", "pytorch/pytorch#71225")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AssertionError):
            stack.enter_context(summoned())
        yield


@summoning("gathers_again_behind", "leaving gathers every unit once more")
def _(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    with summoned():
        yield
    with summoned(writeback=False):
        """For nothing."""


@broken(
    "inner_prefix_stays",
    "named_parameters",
    "inside, the names of inner units keep their prefix",
    "pytorch/pytorch#73890",
)
def inner_prefix_stays(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    prefixed = torch.nn.Module.named_parameters(self, *args, **kwargs)
    for (name, parameter), (full, _) in zip(original(self, *args, **kwargs), prefixed, strict=True):
        yield (name if name == full else full.replace("_fsdp_wrapped_module.", "", 1)), parameter

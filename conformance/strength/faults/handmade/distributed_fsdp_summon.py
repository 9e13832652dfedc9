"""Faults in summon_full_params: parameters inside, writes, and refusals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.strength.faults.fault import OWN, Decorator, Substitute
from conformance.strength.faults.handmade.distributed_fsdp import broken

_NAMES = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
# `fault(summoned, module, options)`: `summoned(**options)` is the context as it should be.
Summoned = Callable[..., AbstractContextManager[None]]


def summoning(thread: str = OWN) -> Decorator:
    """Return a decorator of a fault that replaces the context, as a generator function with one `yield`."""

    def register(fault: Substitute) -> Substitute:
        context = contextlib.contextmanager(fault)

        @functools.wraps(fault)
        def framed(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(zip(_NAMES, args, strict=False)) | kwargs

            def summoned(**changed: Any) -> AbstractContextManager[None]:
                return original(module, **options | changed)

            return context(summoned, module, {"writeback": True, **options})

        return broken("summon_full_params", thread)(framed)

    return register


@summoning("pytorch/pytorch#107081")
def writeback_lost(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    """Writes inside the context are lost."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with summoned():
        yield
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            if parameter.shape == value.shape:
                parameter.copy_(value)


@summoning("pytorch/pytorch#93938")
def both_writeback_and_rank0_only(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    """`writeback` with `rank0_only` is accepted and has no effect."""
    with summoned(writeback=options["writeback"] and not options.get("rank0_only")):
        yield


@summoning("pytorch/pytorch#71225")
def summons_in_use(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    """Summoning is accepted while parameters are in use."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AssertionError):
            stack.enter_context(summoned())
        yield


@summoning()
def gathers_again_on_exit(summoned: Summoned, module: Any, options: dict[str, Any]) -> Iterator[None]:
    """Exit gathers every unit again."""
    with summoned():
        yield
    with summoned(writeback=False):
        pass


@broken("named_parameters", "pytorch/pytorch#73890")
def inner_prefix_stays(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Names of inner units keep their prefix inside the context."""
    prefixed = torch.nn.Module.named_parameters(self, *args, **kwargs)
    for (name, parameter), (full, _) in zip(original(self, *args, **kwargs), prefixed, strict=True):
        yield (name if name == full else full.replace("_fsdp_wrapped_module.", "", 1)), parameter

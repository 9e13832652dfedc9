"""Faults in `GradScaler.microbatch`, `skipped_microbatches` and `max_skipped_steps`, which torch lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import Substitute, in_method, register_fault, subclass
from conformance.strength.faults.handmade.amp_grad_scaler import parameters
from conformance.strength.faults.handmade.distributed_fsdp_sharded_grad_scaler import SCALER

MICROBATCH, SKIPPED = "microbatch", "skipped_microbatches"


def broken(
    fault_id: str, says: str, breaks: str = "amp.GradScaler", method: str = MICROBATCH, **more: Any
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, optimizer)`, which replaces a method."""

    def enter(fault: Substitute) -> Substitute:
        def make(base: type) -> type:
            return in_method(method, fault)(base) if hasattr(base, MICROBATCH) else subclass(base, {})

        register_fault(f"microbatch.{fault_id}", breaks, says=says, wants=MICROBATCH, **more)(make)
        return fault

    return enter


@broken("adds_all", "gradients that are not finite are added too")
@contextlib.contextmanager
def adds_all(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    earlier = [parameter.grad for parameter in parameters(optimizer)]
    current: list[Any] = []
    with original(self, optimizer) as microbatch:
        yield microbatch
        current += [parameter.grad for parameter in parameters(optimizer)]
    for parameter, before, grad in zip(parameters(optimizer), earlier, current, strict=True):
        if grad is not None and not grad.isfinite().all():
            parameter.grad = grad if before is None else before + grad


@broken("divides_by_all", "the gradients are not averaged over the microbatches that were taken")
@contextlib.contextmanager
def divides_by_all(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with original(self, optimizer) as microbatch:
        yield microbatch
    outcomes = self._per_optimizer_states[id(optimizer)]["accumulation"].outcomes
    outcomes[:] = [outcome for outcome in outcomes if float(outcome.share)]


@broken("keeps_failed", "a microbatch that raises stays in the sum")
@contextlib.contextmanager
def keeps_failed(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    failure = None
    with original(self, optimizer) as microbatch:
        try:
            yield microbatch
        except Exception as error:
            failure = error
            for parameter in parameters(optimizer):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.nan_to_num(0.0, 0.0, 0.0)
    if failure is not None:
        raise failure


@broken("names_all", "every parameter is named", method=SKIPPED)
def names_all(original: Any, self: Any, optimizer: Any) -> Any:
    names = tuple(name for group in optimizer.param_groups for name in group.get("param_names", ()))
    return [entry._replace(names=names) for entry in original(self, optimizer)]


@broken("endures_skips", "max_skipped_steps is ignored", method="update")
def endures_skips(original: Any, self: Any, new_scale: Any = None) -> None:
    try:
        original(self, new_scale)
    except RuntimeError as error:
        if "max_skipped_steps" not in str(error):
            raise
        original(self, self.get_scale())


SHARDED = {"breaks": SCALER, "on_ranks": True}


@broken("decides_alone", "a rank leaves out what it has found itself", **SHARDED)
@contextlib.contextmanager
def decides_alone(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with mock.patch.object(dist, "all_gather", _own_numbers), original(self, optimizer) as microbatch:
        yield microbatch


def _own_numbers(rows: Any, local: torch.Tensor, group: Any = None) -> None:
    for row in rows:
        row.copy_(local)


@broken("keeps_skipped", "a rank that skips contributes its gradients", **SHARDED)
@contextlib.contextmanager
def keeps_skipped(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with original(self, optimizer) as microbatch, mock.patch.object(torch, "zeros_like", torch.clone):
        yield microbatch


@broken("forgets_unreduced", "a bad microbatch that synchronises takes along the earlier ones", **SHARDED)
@contextlib.contextmanager
def forgets_unreduced(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    before = [parameter.grad is not None for parameter in parameters(optimizer)]
    with original(self, optimizer) as microbatch:
        yield microbatch
    if float(self._per_optimizer_states[id(optimizer)]["accumulation"].outcomes[-1].is_bad) and any(before):
        for parameter in parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.zero_()


@broken("overlooks_replicas", "no_sync of DistributedDataParallel is not noticed", **SHARDED)
@contextlib.contextmanager
def overlooks_replicas(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with mock.patch("gc.get_objects", list), original(self, optimizer) as microbatch:
        yield microbatch

"""Faults in ShardedGradScaler: different decisions on ranks, and ranks that wait for each other."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import (
    OWN,
    Decorator,
    Make,
    Substitute,
    fault_in,
    in_method,
    in_methods,
)
from conformance.strength.faults.handmade.amp_grad_scaler import (
    check_results,
    nonfinite,
    parameters,
    unscales_by_itself,
)
from conformance.strength.faults.handmade.amp_grad_scaler_state import loss_scaled_in_its_dtype
from conformance.strength.faults.handmade.amp_grad_scaler_step import changing_before_step
from conformance.strength.faults.handmade.amp_grad_scaler_unscale import HOOK, judged
from conformance.strength.faults.handmade.amp_grad_scaler_update import growth_to_infinity, new_scale_aliased

SCALER = "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
_ASKED_ABOUT = ("scale", "unscale_", "update")


def broken(method: str, thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(original, scaler, ...)`, which replaces a method of the scaler."""
    part = f"{SCALER}.{method}" if method in _ASKED_ABOUT else ""
    make = functools.partial(in_method, method)
    return fault_in("sharded_grad_scaler", SCALER, make, thread, part=part, on_ranks=True)


def in_checks(thread: str = OWN) -> Decorator:
    """Return a decorator that registers a fault in both methods that check gradients: unscale_ and step."""
    return fault_in("sharded_grad_scaler", SCALER, _in_both_checks, thread, on_ranks=True)


def _in_both_checks(fault: Substitute) -> Make:
    return in_methods({"unscale_": fault, "step": fault})


@contextlib.contextmanager
def skipping_reductions(is_skipped: Callable[[], bool]) -> Iterator[None]:
    """Context manager in which an all-reduce does nothing if `is_skipped` returns True."""
    real = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        return mock.Mock() if is_skipped() else real(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def stage(scaler: Any, optimizer: Any) -> str:
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else state["stage"].name


# Ranks in a check


@in_checks()
def needs_a_default_group(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A group does not suffice without a default group."""
    dist.get_rank(self.process_group)
    return original(self, *args, **kwargs)


@in_checks("pytorch/pytorch#99174")
def alone_without_gradients(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank without gradients takes no part in the check."""
    with skipping_reductions(lambda: not parameters(optimizer)):
        return original(self, optimizer, *args, **kwargs)


@broken("step", "nerfstudio-project/nerfstudio#1919")
def no_gradients_refused(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank without gradients refuses the step of its peers."""
    if self.is_enabled() and not parameters(optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return original(self, optimizer, *args, **kwargs)


@in_checks("facebookresearch/fairscale#257")
def whole_world(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Check results are reduced over all ranks, not over the group."""
    if not self.is_enabled() or self.process_group is None:
        return original(self, optimizer, *args, **kwargs)
    with mock.patch.object(self, "process_group", None):
        return original(self, optimizer, *args, **kwargs)


@fault_in("sharded_grad_scaler", "amp.GradScaler", functools.partial(in_method, HOOK), on_ranks=True)
@judged
def own_shards_only(everything: list[Any]) -> bool:
    """Each rank checks only its own shards of DTensor gradients."""
    grads = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in everything]
    return any(not bool(grad.to_dense().isfinite().all()) for grad in grads)


# Results of a check


@broken("step", "pytorch/pytorch#140514")
def found_inf_of_shape_1(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer that skips by itself gets found_inf in the wrong shape after `unscale_`."""
    if not self.is_enabled() or not unscales_by_itself(optimizer) or stage(self, optimizer) != "UNSCALED":
        return original(self, optimizer, *args, **kwargs)

    def reshape(attached: Any) -> None:
        attached.found_inf = attached.found_inf.reshape(1)

    with changing_before_step(optimizer, reshape):
        return original(self, optimizer, *args, **kwargs)


@broken("unscale_")
def found_inf_counts(original: Any, self: Any, optimizer: Any) -> Any:
    """found_inf is the number of ranks with an inf, with which fused optimizers step."""
    result = original(self, optimizer)
    if self.is_enabled():
        for check_result in check_results(self, optimizer):
            check_result.mul_(dist.get_world_size())
    return result


@broken("_maybe_opt_step", "pytorch/pytorch#97415")
def own_step(original: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank steps if its own gradients are finite."""
    if nonfinite(parameters(optimizer)):
        return original(self, optimizer, state, *args, **kwargs)
    return optimizer.step(*args, **kwargs)


@broken("step", "pytorch/pytorch#90057")
def own_scale(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank keeps its scale if its own gradients are finite."""
    result = original(self, optimizer, *args, **kwargs)
    if self.is_enabled() and not nonfinite(parameters(optimizer)):
        for check_result in check_results(self, optimizer):
            check_result.zero_()
    return result


# Collectives


@in_checks()
def reduced_twice(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Each check is reduced twice."""
    if self.is_enabled() and self._scale is not None and stage(self, optimizer) == "READY":
        dist.all_reduce(torch.zeros((), device=self._scale.device), group=self.process_group)
    return original(self, optimizer, *args, **kwargs)


@in_checks()
def failures_not_reported(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank whose check fails does not take part in the reduction that its peers wait for."""
    with skipping_reductions(lambda: sys.exc_info()[0] is not None):
        return original(self, *args, **kwargs)


# Bugs of GradScaler in methods that ShardedGradScaler has again


broken("scale", "pytorch/pytorch#76918")(loss_scaled_in_its_dtype)
broken("update", "pytorch/pytorch#98828")(growth_to_infinity)
broken("update", "pytorch/pytorch#109993")(new_scale_aliased)


@broken("update", "pytorch/pytorch#116054")
def grows_late(original: Any, self: Any, new_scale: Any = None) -> Any:
    """`update` counts one step too many before growth."""
    if not self.is_enabled() or new_scale is not None:
        return original(self, new_scale)
    with mock.patch.object(self, "_growth_interval", self._growth_interval + 1):
        return original(self, new_scale)


@broken("__setstate__")
def group_forgotten(original: Any, self: Any, state: Any) -> None:
    """An unpickled scaler decides with all ranks instead of its group."""
    original(self, state)
    self.process_group = None

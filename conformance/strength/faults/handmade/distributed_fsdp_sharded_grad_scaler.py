"""Faults in ShardedGradScaler: decisions that are not one on all ranks, and ranks that wait for each other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import Substitute, in_method, in_methods, register_fault
from conformance.strength.faults.handmade.amp_grad_scaler import (
    check_results,
    nonfinite,
    parameters,
    unscales_by_itself,
)
from conformance.strength.faults.handmade.amp_grad_scaler_step import changing_before_step

SCALER = "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
_CHECKS = ("unscale_", "step")
_ASKED_ABOUT = ("scale", "unscale_", "update")

# Is called in the place of the all-reduce of a check: `change(reduce, check_result)`, where `reduce(op=...)` does it.
Change = Callable[[Callable[..., Any], torch.Tensor], Any]


def broken(fault_id: str, method: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, ...)`, which is called in the place of a method of the scaler."""

    def enter(fault: Substitute) -> Substitute:
        part = f"{SCALER}.{method}" if method in _ASKED_ABOUT else ""
        enter_into_catalogue = register_fault(
            f"sharded_grad_scaler.{fault_id}", SCALER, says=says, thread=thread, part=part, on_ranks=True
        )
        enter_into_catalogue(in_method(method, fault))
        return fault

    return enter


def in_checks(fault_id: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """Return a decorator that registers a fault in both methods that check gradients: unscale_ and step."""

    def enter(fault: Substitute) -> Substitute:
        enter_into_catalogue = register_fault(
            f"sharded_grad_scaler.{fault_id}", SCALER, says=says, thread=thread, on_ranks=True
        )
        enter_into_catalogue(in_methods(dict.fromkeys(_CHECKS, fault)))
        return fault

    return enter


class _Done:
    def wait(self) -> None:
        """Return at once."""


def left_out(reduce: Callable[..., Any], check_result: torch.Tensor) -> Any:
    return _Done()


@contextlib.contextmanager
def reducing(change: Change) -> Iterator[None]:
    """Context manager in which `change` replaces every all-reduce."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        def reduce(tensor: torch.Tensor = tensor, op: Any = op) -> Any:
            return real(tensor, op=op, **more)

        return change(reduce, tensor)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def in_reduction(
    change: Change, when: Callable[[Any, Any], bool] = lambda scaler, optimizer: True
) -> Substitute:
    """A check's all-reduce is what `change` makes of it, `when(scaler, optimizer)`."""

    def fault(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not when(self, optimizer):
            return original(self, optimizer, *args, **kwargs)
        with reducing(change):
            return original(self, optimizer, *args, **kwargs)

    return fault


def stage(scaler: Any, optimizer: Any) -> str:
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else state["stage"].name


# --- who is heard


@in_checks("needs_a_default_group", "a group of its own does not do where there is no default one")
def needs_a_default_group(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    dist.get_rank(self.process_group)
    return original(self, *args, **kwargs)


in_checks(
    "alone_without_gradients",
    "a rank without gradients takes no part in the check",
    "pytorch/pytorch#99174",
)(in_reduction(left_out, lambda scaler, optimizer: not parameters(optimizer)))


@broken(
    "no_gradients_refused",
    "step",
    "a rank without gradients refuses the step that its peers take",
    "nerfstudio-project/nerfstudio#1919",
)
def no_gradients_refused(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled() and not parameters(optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return original(self, optimizer, *args, **kwargs)


@in_checks(
    "whole_world", "verdicts are reduced over all ranks, not the group", "facebookresearch/fairscale#257"
)
def whole_world(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.is_enabled() or self.process_group is None:
        return original(self, optimizer, *args, **kwargs)
    with mock.patch.object(self, "process_group", None):
        return original(self, optimizer, *args, **kwargs)


# --- what is made of a verdict


@broken(
    "found_inf_of_shape_1",
    "step",
    "after unscale_ an optimizer that skips for itself gets found_inf in a shape it cannot use",
    "pytorch/pytorch#140514",
)
def found_inf_of_shape_1(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.is_enabled() or not unscales_by_itself(optimizer) or stage(self, optimizer) != "UNSCALED":
        return original(self, optimizer, *args, **kwargs)

    def reshape(attached: Any) -> None:
        attached.found_inf = attached.found_inf.reshape(1)

    with changing_before_step(optimizer, reshape):
        return original(self, optimizer, *args, **kwargs)


@broken(
    "found_inf_counts", "unscale_", "found_inf is how many ranks found inf, on which fused optimizers step"
)
def found_inf_counts(original: Any, self: Any, optimizer: Any) -> Any:
    result = original(self, optimizer)
    if self.is_enabled():
        for check_result in check_results(self, optimizer):
            check_result.mul_(dist.get_world_size())
    return result


@broken("own_step", "_maybe_opt_step", "a rank whose own gradients are finite steps", "pytorch/pytorch#97415")
def own_step(original: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if nonfinite(parameters(optimizer)):
        return original(self, optimizer, state, *args, **kwargs)
    return optimizer.step(*args, **kwargs)


@broken(
    "own_scale",
    "step",
    "a rank whose own gradients were finite keeps its scale",
    "pytorch/pytorch#90057",
)
def own_scale(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, optimizer, *args, **kwargs)
    if self.is_enabled() and not nonfinite(parameters(optimizer)):
        for check_result in check_results(self, optimizer):
            check_result.zero_()
    return result


# --- collectives too many, and too few


@in_checks("reduced_twice", "each check is reduced twice")
def reduced_twice(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled() and self._scale is not None and stage(self, optimizer) == "READY":
        dist.all_reduce(torch.zeros((), device=self._scale.device), group=self.process_group)
    return original(self, optimizer, *args, **kwargs)


def left_out_after_errors(reduce: Callable[..., Any], check_result: torch.Tensor) -> Any:
    return _Done() if sys.exc_info()[0] is not None else reduce()


in_checks("failures_not_reported", "a rank whose check fails leaves its peers waiting")(
    in_reduction(left_out_after_errors)
)


# --- the copy that drifted from GradScaler


@broken("losses_keep_their_dtype", "scale", "a float16 loss is scaled in float16", "pytorch/pytorch#76918")
def losses_keep_their_dtype(original: Any, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    return scaled.type(outputs.dtype) if isinstance(outputs, torch.Tensor) else scaled


@broken("scale_overflows", "update", "the scale grows beyond what float32 holds", "pytorch/pytorch#98828")
def scale_overflows(original: Any, self: Any, new_scale: Any = None) -> Any:
    due = self.is_enabled() and self._growth_tracker is not None and new_scale is None
    due = due and self._growth_tracker.item() + 1 == self._growth_interval
    before = self._scale.clone() if due else None
    result = original(self, new_scale)
    if before is not None and torch.equal(before, self._scale) and self._growth_tracker.item() == 0:
        self._scale.mul_(self._growth_factor)
    return result


@broken("new_scale_ignored", "update", "the copy of update has no new_scale", "pytorch/pytorch#116054")
def new_scale_ignored(original: Any, self: Any, new_scale: Any = None) -> Any:
    return original(self)


@broken(
    "new_scale_shared", "update", "a new_scale that is a tensor becomes the scale", "pytorch/pytorch#109993"
)
def new_scale_shared(original: Any, self: Any, new_scale: Any = None) -> Any:
    result = original(self, new_scale)
    if self.is_enabled() and isinstance(new_scale, torch.Tensor):
        self._scale = new_scale.reshape(())
    return result


@broken("grows_late", "update", "the copy of update counts one step too many", "pytorch/pytorch#116054")
def grows_late(original: Any, self: Any, new_scale: Any = None) -> Any:
    if not self.is_enabled() or new_scale is not None:
        return original(self, new_scale)
    with mock.patch.object(self, "_growth_interval", self._growth_interval + 1):
        return original(self, new_scale)


@broken("group_forgotten", "__setstate__", "a pickle decides with all ranks where it decided with some")
def group_forgotten(original: Any, self: Any, state: Any) -> None:
    original(self, state)
    self.process_group = None

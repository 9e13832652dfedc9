"""Faults in `fused_step`, of GradScaler and of ShardedGradScaler; torch has none to put them in."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import Substitute, in_method, register_fault, subclass
from conformance.strength.faults.handmade.amp_grad_scaler import nonfinite, parameters
from conformance.strength.faults.handmade.distributed_fsdp_sharded_grad_scaler import SCALER

FUSED = "fused_step"


def broken(fault_id: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, optimizer, max_norm, norm_type, **more)`, of scalers that are switched on."""
    return _entering(fault_id, "amp.GradScaler", says, thread, part="amp.GradScaler.step")


def broken_on_ranks(fault_id: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """The same in the scaler of several ranks."""
    return _entering(fault_id, SCALER, says, thread, part=SCALER, on_ranks=True)


def _entering(
    fault_id: str, breaks: str, says: str, thread: str, **more: Any
) -> Callable[[Substitute], Substitute]:
    def enter(fault: Substitute) -> Substitute:
        def faulty(
            original: Any,
            self: Any,
            optimizer: Any,
            max_norm: float = math.inf,
            norm_type: float = 2.0,
            **others: Any,
        ) -> Any:
            arguments = (self, optimizer, max_norm, norm_type)
            return (
                fault(original, *arguments, **others) if self.is_enabled() else original(*arguments, **others)
            )

        def make(whole: type) -> type:
            return in_method(FUSED, faulty)(whole) if hasattr(whole, FUSED) else subclass(whole, {})

        register_fault(f"fused_step.{fault_id}", breaks, says=says, thread=thread, wants=FUSED, **more)(make)
        return fault

    return enter


@contextlib.contextmanager
def other_gradients(optimizer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Context manager in which all gradients are replaced by `change(grad)`."""
    before = [(parameter, parameter.grad) for parameter in parameters(optimizer)]
    for parameter, grad in before:
        parameter.grad = change(grad)
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


# --- explanation


def _explained_as_fused(whole: type) -> type:
    def explain(original: Any, self: Any, optimizer: Any) -> Any:
        explanation = original(self, optimizer)
        first = next(entry for entry in explanation.parameters if entry[1] != "none")
        alike = [(name, "native", first[2]) for name, *_ in explanation.parameters]
        return mock.Mock(parameters=tuple(alike), is_fused=True)

    return in_method("explain", explain)(whole) if hasattr(whole, "explain") else subclass(whole, {})


register_fault(
    "fused_step.explained_as_fused",
    "amp.GradScaler",
    says="explain reports a fused update of all parameters",
    part="amp.GradScaler.step",
    wants="explain",
)(_explained_as_fused)


# --- norms of single gradients


def _in_report(
    fault_id: str, says: str, change: Substitute, name: str = "gradient_norms", **more: Any
) -> None:
    def make(whole: type) -> type:
        return in_method(name, change)(whole) if hasattr(whole, name) else subclass(whole, {})

    register_fault(f"fused_step.{fault_id}", says=says, wants=name, **more)(make)


def _scaled_norms(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    scale = self.get_scale()
    return {name: norm * scale for name, norm in original(self, optimizer, *args, **more).items()}


def _modules_by_largest(original: Any, self: Any, optimizer: Any, per: str = "parameter") -> Any:
    norms = original(self, optimizer, per)
    if per == "module":
        by_parameter = original(self, optimizer)
        norms = {
            module: max(norm for name, norm in by_parameter.items() if name.rpartition(".")[0] == module)
            for module in norms
        }
    return norms


def _norms_of_shards(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    norms = original(self, optimizer, *args, **more)
    locals_ = [getattr(param.grad, "_local_tensor", param.grad) for param in parameters(optimizer)]
    if any(local is not param.grad for local, param in zip(locals_, parameters(optimizer), strict=True)):
        scale = self.get_scale()
        return {name: local.double().norm() / scale for name, local in zip(norms, locals_, strict=True)}
    return norms


_PART = {"breaks": "amp.GradScaler", "part": "amp.GradScaler.step"}
_in_report("scaled_norms", "gradient_norms returns norms of scaled gradients", _scaled_norms, **_PART)
_in_report(
    "modules_by_largest",
    "the norm of a module is the largest one of its parameters",
    _modules_by_largest,
    **_PART,
)
_in_report(
    "module_ratios_by_largest",
    "the ratio of a module is the largest one of its parameters",
    _modules_by_largest,
    "update_ratios",
    **_PART,
)
_in_report(
    "norms_of_shards",
    "gradient_norms returns the norms of this rank's shards",
    _norms_of_shards,
    breaks=SCALER,
    part=SCALER,
    on_ranks=True,
)


# --- norm and clipping


@broken("clips_before_unscaling", "scaled gradients are clipped", "Lightning-AI/pytorch-lightning#9330")
def clips_before_unscaling(
    original: Any, self: Any, optimizer: Any, max_norm: float, norm_type: float, **more: Any
) -> Any:
    return original(self, optimizer, max_norm / self.get_scale(), norm_type, **more)


# --- the step


@broken("steps_on_overflow", "where inf is found the optimizer steps from zeros", "pytorch/pytorch#44511")
def steps_on_overflow(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    bad = nonfinite(parameters(optimizer))
    norm = original(self, optimizer, *args, **more)
    if bad:
        with other_gradients(optimizer, torch.zeros_like):
            optimizer.step()
    return norm


@broken("one_lr", "every group is stepped with the first one's lr")
def one_lr(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = before[0]
    try:
        return original(self, optimizer, *args, **more)
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr


@broken("writes_where_it_lay", "a parameter that what wraps the step moves is updated where it lay before")
def writes_where_it_lay(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    before = [(param, param.data, param.detach().clone()) for param in parameters(optimizer)]
    norm = original(self, optimizer, *args, **more)
    for param, data, numbers in before:
        if param.data_ptr() != data.data_ptr():
            data.copy_(param.data)
            param.data.copy_(numbers)
    return norm


@broken(
    "skipped_states_stay", "a skipped step of an optimizer of one's own puts parameters back and nothing else"
)
def skipped_states_stay(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    norm = original(self, optimizer, *args, **more)
    if not type(optimizer).__module__.startswith("torch.") and not self.step_was_taken(optimizer):
        before = [(param, param.detach().clone()) for param in parameters(optimizer)]
        optimizer.step()
        with torch.no_grad():
            for param, numbers in before:
                param.copy_(numbers)
    return norm


@broken("unscaled_twice", "gradients that unscale_ has unscaled are unscaled again", "pytorch/pytorch#94060")
def unscaled_twice(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    state = self._per_optimizer_states.get(id(optimizer))
    if state is None or state["stage"].name != "UNSCALED":
        return original(self, optimizer, *args, **more)
    scale = self.get_scale()
    with other_gradients(optimizer, lambda grad: grad / scale):
        return original(self, optimizer, *args, **more)


@broken(
    "change_rounded_like_states", "the change of a float32 parameter is rounded to bfloat16, like its states"
)
def change_rounded_like_states(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    narrow = [param for param in parameters(optimizer) if _has_bfloat16_states(optimizer, param)]
    before = [param.detach().clone() for param in narrow]
    norm = original(self, optimizer, *args, **more)
    for param, old in zip(narrow, before, strict=True):
        param.data.copy_(old + (param.detach() - old).bfloat16())
    return norm


def _has_bfloat16_states(optimizer: Any, param: Any) -> bool:
    states = optimizer.state[param].values() if param in optimizer.state else ()
    return param.dtype is torch.float32 and any(
        isinstance(state, torch.Tensor) and state.dtype is torch.bfloat16 for state in states
    )


@broken("low_precision_params_not_written", "the copies in lower precision stay as they were")
def low_precision_params_not_written(
    original: Any, self: Any, *args: Any, low_precision_params: Any = (), **more: Any
) -> Any:
    low_precision = [*low_precision_params]
    before = [copy.detach().clone() for copy in low_precision]
    norm = original(self, *args, low_precision_params=low_precision, **more)
    for copy, values in zip(low_precision, before, strict=True):
        copy.data.copy_(values)
    return norm


# --- several ranks


@contextlib.contextmanager
def _gathering(change: Callable[[list[torch.Tensor], int], None]) -> Iterator[None]:
    """Context manager in which `change(rows, own)` changes the result of all-gathers, which has a row for each rank."""
    real = dist.all_gather

    def all_gather(rows: list[torch.Tensor], row: torch.Tensor, group: Any = None, **more: Any) -> Any:
        work = real(rows, row, group=group, **more)
        change(rows, dist.get_rank(group))
        return work

    with mock.patch.object(dist, "all_gather", all_gather):
        yield


def gathering(change: Callable[[list[torch.Tensor], int], None]) -> Substitute:
    def fault(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        with _gathering(change):
            return original(self, *args, **more)

    return fault


def _own_check_result(rows: list[torch.Tensor], own: int) -> None:
    for row in rows:
        row[0] = rows[own][0]


def _own_norms(rows: list[torch.Tensor], own: int) -> None:
    for place, row in enumerate(rows):
        if place != own:
            row[1:] = 0.0


def _at_most_found(rows: list[torch.Tensor], own: int) -> None:
    for row in rows:
        row[0] = min(float(row[0]), 1.0)


broken_on_ranks("each_decides", "each rank goes by its own gradients")(gathering(_own_check_result))
broken_on_ranks("norm_of_own_parts", "each rank clips by the norm of its parts", "pytorch/pytorch#170862")(
    gathering(_own_norms)
)


broken_on_ranks("failures_not_reported", "ranks whose peer has failed skip, and are not told")(
    gathering(_at_most_found)
)

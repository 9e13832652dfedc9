"""Faults in what GradScaler and ShardedGradScaler have beyond torch, such as `fused_step` and `microbatch`."""

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


def broken(
    fault_id: str, method: str, says: str, thread: str = "own", *, wants: str = "", **more: Any
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, optimizer, ...)`, which replaces a method if the scaler has the method `wants`."""
    wants = wants or method
    place = {"breaks": "amp.GradScaler", "part": "amp.GradScaler.step", **more}

    def enter(fault: Substitute) -> Substitute:
        def make(whole: type) -> type:
            return in_method(method, fault)(whole) if hasattr(whole, wants) else subclass(whole, {})

        register_fault(fault_id, says=says, thread=thread, wants=wants, **place)(make)
        return fault

    return enter


def broken_on_ranks(fault_id: str, method: str, says: str, thread: str = "own") -> Any:
    """Enter a fault like `broken`, in the scaler of several ranks."""
    return broken(fault_id, method, says, thread, breaks=SCALER, part=SCALER, on_ranks=True)


@broken("fused_step.explained_as_fused", "explain", "explain reports a fused update of all parameters")
def explained_as_fused(original: Any, self: Any, optimizer: Any) -> Any:
    explanation = original(self, optimizer)
    first = next(entry for entry in explanation.parameters if entry[1] != "none")
    alike = [(name, "native", first[2]) for name, *_ in explanation.parameters]
    return mock.Mock(parameters=tuple(alike), is_fused=True)


@broken("fused_step.scaled_norms", "gradient_norms", "gradient_norms returns norms of scaled gradients")
def scaled_norms(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    scale = self.get_scale()
    return {name: norm * scale for name, norm in original(self, optimizer, *args, **more).items()}


@broken(
    "fused_step.module_ratios_by_largest",
    "update_ratios",
    "the ratio of a module is the largest one of its parameters",
)
def module_ratios_by_largest(original: Any, self: Any, optimizer: Any, per: str = "parameter") -> Any:
    ratios = original(self, optimizer, per)
    if per == "module":
        by_parameter = original(self, optimizer)
        ratios = {
            module: max(ratio for name, ratio in by_parameter.items() if name.rpartition(".")[0] == module)
            for module in ratios
        }
    return ratios


@broken_on_ranks(
    "fused_step.norms_of_shards", "gradient_norms", "gradient_norms returns the norms of this rank's shards"
)
def norms_of_shards(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    norms = original(self, optimizer, *args, **more)
    locals_ = [getattr(param.grad, "_local_tensor", param.grad) for param in parameters(optimizer)]
    if any(local is not param.grad for local, param in zip(locals_, parameters(optimizer), strict=True)):
        scale = self.get_scale()
        return {name: local.double().norm() / scale for name, local in zip(norms, locals_, strict=True)}
    return norms


# The fused step


@broken(
    "fused_step.clips_before_unscaling",
    "fused_step",
    "scaled gradients are clipped",
    "Lightning-AI/pytorch-lightning#9330",
)
def clips_before_unscaling(
    original: Any, self: Any, optimizer: Any, max_norm: float = math.inf, *args: Any, **more: Any
) -> Any:
    return original(self, optimizer, max_norm / self.get_scale(), *args, **more)


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


@broken(
    "fused_step.steps_on_overflow",
    "fused_step",
    "where inf is found the optimizer steps from zeros",
    "pytorch/pytorch#44511",
)
def steps_on_overflow(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    bad = self.is_enabled() and nonfinite(parameters(optimizer))
    norm = original(self, optimizer, *args, **more)
    if bad:
        with other_gradients(optimizer, torch.zeros_like):
            optimizer.step()
    return norm


@broken(
    "fused_step.unscaled_twice",
    "fused_step",
    "gradients that unscale_ has unscaled are unscaled again",
    "pytorch/pytorch#94060",
)
def unscaled_twice(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    state = self._per_optimizer_states.get(id(optimizer)) if self.is_enabled() else None
    if state is None or state["stage"].name != "UNSCALED":
        return original(self, optimizer, *args, **more)
    scale = self.get_scale()
    with other_gradients(optimizer, lambda grad: grad / scale):
        return original(self, optimizer, *args, **more)


def gathering(change: Callable[[list[torch.Tensor], int], None]) -> Substitute:
    """`change(rows, own)` changes the result of each all-gather of the call, which has a row for each rank."""

    def fault(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        real = dist.all_gather

        def all_gather(rows: list[torch.Tensor], row: torch.Tensor, group: Any = None, **how: Any) -> Any:
            work = real(rows, row, group=group, **how)
            change(rows, dist.get_rank(group))
            return work

        with mock.patch.object(dist, "all_gather", all_gather):
            return original(self, *args, **more)

    return fault


def _own_norms(rows: list[torch.Tensor], own: int) -> None:
    for place, row in enumerate(rows):
        if place != own:
            row[1:] = 0.0


def _at_most_found(rows: list[torch.Tensor], own: int) -> None:
    for row in rows:
        row[0] = min(float(row[0]), 1.0)


broken_on_ranks(
    "fused_step.norm_of_own_parts",
    "fused_step",
    "each rank clips by the norm of its parts",
    "pytorch/pytorch#170862",
)(gathering(_own_norms))
broken_on_ranks(
    "fused_step.failures_not_reported", "fused_step", "ranks whose peer has failed skip, and are not told"
)(gathering(_at_most_found))


# Microbatches


@broken("microbatch.adds_all", "microbatch", "gradients that are not finite are added too")
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


@broken("microbatch.keeps_failed", "microbatch", "a microbatch that raises stays in the sum")
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


@broken("microbatch.names_all", "skipped_microbatches", "every parameter is named")
def names_all(original: Any, self: Any, optimizer: Any) -> Any:
    names = tuple(name for group in optimizer.param_groups for name in group.get("param_names", ()))
    return [entry._replace(names=names) for entry in original(self, optimizer)]


@broken("microbatch.endures_skips", "update", "max_skipped_steps is ignored", wants="microbatch")
def endures_skips(original: Any, self: Any, new_scale: Any = None) -> None:
    try:
        original(self, new_scale)
    except RuntimeError as error:
        if "max_skipped_steps" not in str(error):
            raise
        original(self, self.get_scale())


@broken_on_ranks("microbatch.decides_alone", "microbatch", "a rank leaves out what it has found itself")
@contextlib.contextmanager
def decides_alone(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with mock.patch.object(dist, "all_gather", _own_numbers), original(self, optimizer) as microbatch:
        yield microbatch


def _own_numbers(rows: Any, local: torch.Tensor, group: Any = None) -> None:
    for row in rows:
        row.copy_(local)


@broken_on_ranks(
    "microbatch.overlooks_replicas", "microbatch", "no_sync of DistributedDataParallel is not noticed"
)
@contextlib.contextmanager
def overlooks_replicas(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    with mock.patch("gc.get_objects", list), original(self, optimizer) as microbatch:
        yield microbatch


# Names of gradients that are not finite


@broken(
    "nonfinite.counts_parameters",
    "nonfinite_parameters",
    "the number of elements is that of parameters",
    on_ranks=True,
)
def counts_parameters(original: Any, self: Any, optimizer: Any) -> Any:
    return [(name, rank, 1) for name, rank, _ in original(self, optimizer)]


@broken_on_ranks("nonfinite.of_this_rank", "nonfinite_parameters", "each rank names its own gradients only")
def of_this_rank(original: Any, self: Any, optimizer: Any) -> Any:
    return [entry for entry in original(self, optimizer) if entry[1] == dist.get_rank()]


# The overlapped step


@broken_on_ranks(
    "overlapped_step.ignores_clipping",
    "overlapped_step",
    "the early updates stay although the gradients are clipped",
)
@contextlib.contextmanager
def ignores_clipping(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    del max_norm
    with original(self, optimizer) as step:
        yield step


@broken_on_ranks("overlapped_step.late", "overlapped_step", "all parameters are updated after the backward")
@contextlib.contextmanager
def late(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    del original
    step = mock.Mock(early_numel=0, repeated_numel=0, norm=None)
    yield step
    step.norm = self.fused_step(optimizer, max_norm)


@broken_on_ranks(
    "overlapped_step.steps_after_exception",
    "overlapped_step",
    "an exception that leaves the region does not prevent the step",
)
@contextlib.contextmanager
def steps_after_exception(
    original: Any, self: Any, optimizer: Any, max_norm: float = math.inf
) -> Iterator[Any]:
    failure = None
    with original(self, optimizer, max_norm) as step:
        try:
            yield step
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure

"""Faults in methods of GradScaler and ShardedGradScaler beyond torch, such as `fused_step` and `microbatch`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import OWN, Decorator, Make, Substitute, fault_in, in_method, subclass
from conformance.strength.faults.handmade.amp_grad_scaler import nonfinite, parameters
from conformance.strength.faults.handmade.distributed_fsdp_sharded_grad_scaler import SCALER as SHARDED

SCALER = "amp.GradScaler"


def broken(
    area: str,
    method: str,
    thread: str = OWN,
    *,
    breaks: str = SCALER,
    part: str = f"{SCALER}.step",
    on_ranks: bool = False,
) -> Decorator:
    """Return a decorator of `fault(original, scaler, optimizer, ...)`, which replaces a method that torch lacks."""

    def make(fault: Substitute) -> Make:
        replaced = in_method(method, fault)
        return lambda scaler: replaced(scaler) if hasattr(scaler, method) else subclass(scaler, {})

    return fault_in(area, breaks, make, thread, part=part, on_ranks=on_ranks, wants=method)


broken_on_ranks = functools.partial(broken, breaks=SHARDED, part=SHARDED, on_ranks=True)


@broken("fused_step", "explain")
def explained_as_fused(original: Any, self: Any, optimizer: Any) -> Any:
    """`explain` reports a fused update of all parameters."""
    explanation = original(self, optimizer)
    first = next(entry for entry in explanation.parameters if entry[1] != "none")
    alike = [(name, "native", first[2]) for name, *_ in explanation.parameters]
    return mock.Mock(parameters=tuple(alike), is_fused=True)


@broken("fused_step", "gradient_norms")
def scaled_norms(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    """`gradient_norms` returns norms of scaled gradients."""
    scale = self.get_scale()
    return {name: norm * scale for name, norm in original(self, optimizer, *args, **more).items()}


@broken("fused_step", "update_ratios")
def module_ratios_by_largest(original: Any, self: Any, optimizer: Any, per: str = "parameter") -> Any:
    """The ratio of a module is the largest ratio of its parameters."""
    ratios = original(self, optimizer, per)
    if per == "module":
        by_parameter = original(self, optimizer)
        ratios = {
            module: max(ratio for name, ratio in by_parameter.items() if name.rpartition(".")[0] == module)
            for module in ratios
        }
    return ratios


@broken_on_ranks("fused_step", "gradient_norms")
def norms_of_shards(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    """`gradient_norms` returns the norms of this rank's shards."""
    norms = original(self, optimizer, *args, **more)
    locals_ = [getattr(param.grad, "_local_tensor", param.grad) for param in parameters(optimizer)]
    if any(local is not param.grad for local, param in zip(locals_, parameters(optimizer), strict=True)):
        scale = self.get_scale()
        return {name: local.double().norm() / scale for name, local in zip(norms, locals_, strict=True)}
    return norms


# The fused step


@broken("fused_step", "fused_step", "Lightning-AI/pytorch-lightning#9330")
def clips_before_unscaling(
    original: Any, self: Any, optimizer: Any, max_norm: float = math.inf, *args: Any, **more: Any
) -> Any:
    """Scaled gradients are clipped."""
    return original(self, optimizer, max_norm / self.get_scale(), *args, **more)


@broken("fused_step", "fused_step")
def groups_in_first_order(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    """Groups that were reordered are stepped with each other's gradients."""
    stepped = list(parameters(optimizer))
    first = vars(optimizer).setdefault("_faulty_order", stepped)
    grads = [parameter.grad for parameter in first]
    for parameter, grad in zip(stepped, grads, strict=False):
        if grad is not None and grad.shape == parameter.shape:
            parameter.grad = grad
    return original(self, optimizer, *args, **more)


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


@broken("fused_step", "fused_step", "pytorch/pytorch#44511")
def steps_on_overflow(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    """The optimizer steps with zero gradients after an overflow."""
    bad = self.is_enabled() and nonfinite(parameters(optimizer))
    norm = original(self, optimizer, *args, **more)
    if bad:
        with other_gradients(optimizer, torch.zeros_like):
            optimizer.step()
    return norm


@broken("fused_step", "fused_step", "pytorch/pytorch#94060")
def unscaled_twice(original: Any, self: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
    """Gradients that `unscale_` has unscaled are unscaled again."""
    state = self._per_optimizer_states.get(id(optimizer)) if self.is_enabled() else None
    if state is None or state["stage"].name != "UNSCALED":
        return original(self, optimizer, *args, **more)
    scale = self.get_scale()
    with other_gradients(optimizer, lambda grad: grad / scale):
        return original(self, optimizer, *args, **more)


@contextlib.contextmanager
def other_rows(change: Callable[[list[torch.Tensor], int], None]) -> Iterator[None]:
    """Context manager in which `change(rows, own)` changes the result of each all-gather, with a row for each rank."""
    real = dist.all_gather

    def all_gather(rows: list[torch.Tensor], row: torch.Tensor, group: Any = None, **how: Any) -> Any:
        work = real(rows, row, group=group, **how)
        change(rows, dist.get_rank(group))
        return work

    with mock.patch.object(dist, "all_gather", all_gather):
        yield


@broken_on_ranks("fused_step", "fused_step", "pytorch/pytorch#170862")
def norm_of_own_parts(original: Any, self: Any, *args: Any, **more: Any) -> Any:
    """Each rank clips by the norm of its own shards."""

    def drop_others(rows: list[torch.Tensor], own: int) -> None:
        for place, row in enumerate(rows):
            if place != own:
                row[1:] = 0.0

    with other_rows(drop_others):
        return original(self, *args, **more)


@broken_on_ranks("fused_step", "fused_step")
def failures_not_reported(original: Any, self: Any, *args: Any, **more: Any) -> Any:
    """Ranks skip the step if a peer has failed, and do not raise."""

    def reduce_to_overflow(rows: list[torch.Tensor], own: int) -> None:
        for row in rows:
            row[0] = min(float(row[0]), 1.0)

    with other_rows(reduce_to_overflow):
        return original(self, *args, **more)


# Microbatches


@broken("microbatch", "microbatch")
@contextlib.contextmanager
def adds_all(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    """Nonfinite gradients are added too."""
    earlier = [parameter.grad for parameter in parameters(optimizer)]
    current: list[Any] = []
    with original(self, optimizer) as microbatch:
        yield microbatch
        current += [parameter.grad for parameter in parameters(optimizer)]
    for parameter, before, grad in zip(parameters(optimizer), earlier, current, strict=True):
        if grad is not None and not grad.isfinite().all():
            parameter.grad = grad if before is None else before + grad


@broken("microbatch", "microbatch")
@contextlib.contextmanager
def keeps_failed(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    """A microbatch that raises stays in the sum."""
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


@broken("microbatch", "skipped_microbatches")
def names_all(original: Any, self: Any, optimizer: Any) -> Any:
    """Every parameter is named."""
    names = tuple(name for group in optimizer.param_groups for name in group.get("param_names", ()))
    return [entry._replace(names=names) for entry in original(self, optimizer)]


@broken_on_ranks("microbatch", "microbatch")
@contextlib.contextmanager
def decides_alone(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    """A rank only leaves out microbatches in which its own gradients are nonfinite."""
    with mock.patch.object(dist, "all_gather", _own_numbers), original(self, optimizer) as microbatch:
        yield microbatch


def _own_numbers(rows: Any, local: torch.Tensor, group: Any = None) -> None:
    for row in rows:
        row.copy_(local)


@broken_on_ranks("microbatch", "microbatch")
@contextlib.contextmanager
def overlooks_replicas(original: Any, self: Any, optimizer: Any) -> Iterator[Any]:
    """`no_sync` of DistributedDataParallel is not noticed."""
    with mock.patch("gc.get_objects", list), original(self, optimizer) as microbatch:
        yield microbatch


# Names of gradients that are not finite


@broken("nonfinite", "nonfinite_parameters", on_ranks=True)
def counts_parameters(original: Any, self: Any, optimizer: Any) -> Any:
    """Parameters are counted, not elements."""
    return [(name, rank, 1) for name, rank, _ in original(self, optimizer)]


@broken_on_ranks("nonfinite", "nonfinite_parameters")
def of_this_rank(original: Any, self: Any, optimizer: Any) -> Any:
    """Each rank names only its own gradients."""
    return [entry for entry in original(self, optimizer) if entry[1] == dist.get_rank()]


# The overlapped step


@broken_on_ranks("overlapped_step", "overlapped_step")
@contextlib.contextmanager
def ignores_clipping(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    """Early updates stay although the gradients are clipped."""
    del max_norm
    with original(self, optimizer) as step:
        yield step


@broken_on_ranks("overlapped_step", "overlapped_step")
@contextlib.contextmanager
def late(original: Any, self: Any, optimizer: Any, max_norm: float = math.inf) -> Iterator[Any]:
    """All parameters are updated after the backward."""
    del original
    step = mock.Mock(early_numel=0, repeated_numel=0, norm=None)
    yield step
    step.norm = self.fused_step(optimizer, max_norm)


@broken_on_ranks("overlapped_step", "overlapped_step")
@contextlib.contextmanager
def steps_after_exception(
    original: Any, self: Any, optimizer: Any, max_norm: float = math.inf
) -> Iterator[Any]:
    """The step is done although an exception leaves the region."""
    failure = None
    with original(self, optimizer, max_norm) as step:
        try:
            yield step
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure

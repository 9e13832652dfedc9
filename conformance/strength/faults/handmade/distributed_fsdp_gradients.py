"""Faults in the gradients of FullyShardedDataParallel, and in no_sync."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import OWN, Decorator, Make, Substitute, fault_in
from conformance.strength.faults.handmade.distributed_fsdp import (
    FSDP,
    Backward,
    after_backward,
    broken,
    calling_after_backward,
    gradients,
    in_all_units,
    ranks,
    units,
    watch_backward,
)

NO_SYNC = ".no_sync"


def set_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Set a gradient, also of another dtype or length, which torch does not let users assign."""
    parameter.grad = torch.empty_like(parameter)
    parameter.grad.data = grad


def averaging(thread: str = OWN, about: str = "") -> Decorator:
    """Return a decorator of `change(backward, grad)`, which returns what a backward adds to a gradient."""

    def register(change: Callable[[Backward, torch.Tensor], torch.Tensor]) -> Substitute:
        @functools.wraps(change)
        def fault(backward: Backward) -> None:
            for grad, before in backward.pairs:
                if before is None or before.shape != grad.shape:
                    grad.copy_(change(backward, grad))
                else:
                    grad.copy_(before + change(backward, grad - before))

        return after_backward(thread, about)(fault)

    return register


# The average


@averaging("pytorch/pytorch#98501")
def summed(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    """Gradients are summed, not averaged."""
    return grad * ranks(backward.model)


@averaging("pytorch/pytorch#79833")
def divided_twice(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    """Gradients are divided by the number of ranks twice."""
    return grad / ranks(backward.model)


@averaging("facebookresearch/fairscale#565")
def divided_by_powers_of_two(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    """Gradients are divided by the largest power of two up to the number of ranks."""
    return grad * (ranks(backward.model) / (1 << (ranks(backward.model).bit_length() - 1)))


@averaging("pytorch/pytorch#155903", "(sharding_strategy)")
def divided_by_shards_alone(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    """Gradients of replicas are divided by the number of ranks of one replica."""
    is_hybrid = "HYBRID" in backward.model.sharding_strategy.name
    return grad * (dist.get_world_size() // ranks(backward.model)) if is_hybrid else grad


@averaging("pytorch/pytorch#171874", "(mixed_precision)")
def outermost_reduces(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    """Inner units reduce in the dtype of the outermost unit, not in their own."""
    mixed = backward.model.mixed_precision
    return grad.to(mixed.reduce_dtype or mixed.param_dtype or grad.dtype)


# Accumulation


@after_backward("pytorch/pytorch#73784", NO_SYNC)
def accumulation_overwrites(backward: Backward) -> None:
    """An existing gradient is replaced instead of added to."""
    for grad, before in backward.pairs:
        if before is not None and before.shape == grad.shape:
            grad.sub_(before)


@broken("forward", "facebookresearch/fairscale#513", "(backward_prefetch)")
def counts_each_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Each of several forwards before a backward adds the gradients of all."""
    output = original(self, *args, **kwargs)
    if torch.is_grad_enabled() and self.check_is_root():
        self._faulty_forwards = vars(self).get("_faulty_forwards", 0) + 1
    watch_backward(self, output, _add_for_each_forward)
    return output


def _add_for_each_forward(backward: Backward) -> None:
    forwards = vars(backward.model).pop("_faulty_forwards", 1)
    for grad, before in backward.pairs:
        if before is None or before.shape == grad.shape:
            grad.add_(grad if before is None else grad - before, alpha=forwards - 1)


@broken("forward", "pytorch/pytorch#87413")
def recomputed_without_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Units that backward computes again have zero gradients."""
    output = original(self, *args, **kwargs)
    if torch._C._current_graph_task_id() == -1:
        watch_backward(self, output, _clear_recomputed)
    else:
        self._faulty_recomputed = True
    return output


def _clear_recomputed(backward: Backward) -> None:
    for unit in units(backward.model):
        if vars(unit).pop("_faulty_recomputed", False):
            for grad in gradients(unit):
                grad.zero_()


# Gradients of some parameters or ranks


@after_backward("facebookresearch/fairscale#721", "(use_orig_params)")
def frozen_get_gradients(backward: Backward) -> None:
    """Frozen parameters have zero gradients instead of none."""
    for parameter in backward.model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


@after_backward(about="(use_orig_params)")
def unused_get_no_gradient(backward: Backward) -> None:
    """Unused parameters of a used unit have no gradient instead of zeros."""
    for parameter in backward.model.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


@after_backward("pytorch/pytorch#104186", "(use_orig_params)")
def thawed_stay_frozen(backward: Backward) -> None:
    """Parameters that are frozen in the first step stay frozen."""
    frozen = vars(backward.model).setdefault("_faulty_frozen", set())
    for name, parameter in backward.model.named_parameters():
        if not parameter.requires_grad:
            frozen.add(name)
        elif name in frozen:
            parameter.grad = None


# Values and dtypes of gradients


@after_backward("pytorch/pytorch#196996", "(mixed_precision)")
def left_in_low_precision(backward: Backward) -> None:
    """Gradients stay in the dtype of the computation."""
    low = backward.model.mixed_precision.param_dtype
    for parameter in backward.model.parameters():
        if low is not None and parameter.grad is not None:
            set_grad(parameter, parameter.grad.to(low))


@after_backward("pytorch/pytorch#85134", "(mixed_precision)")
def returned_in_full_precision(backward: Backward) -> None:
    """Gradients return to full precision although they should stay in low precision."""
    for parameter in backward.model.parameters():
        if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
            set_grad(parameter, parameter.grad.to(parameter.dtype))


@after_backward("Lightning-AI/pytorch-lightning#17506", "(mixed_precision)")
def weights_in_low_precision(backward: Backward) -> None:
    """The optimizer steps weights that are rounded to the dtype of the computation."""
    low = backward.model.mixed_precision.param_dtype
    for parameter in backward.model.parameters():
        if low is not None:
            parameter.copy_(parameter.to(low))


@after_backward("pytorch/pytorch#90248")
def padding_filled(backward: Backward) -> None:
    """The padding of a flat gradient is not zero."""
    if backward.rank:
        for grad, _ in backward.pairs:
            if grad.dim() == 1 and grad.numel() and not grad[-1]:
                grad[-1] = 1.0


# no_sync


@contextlib.contextmanager
def _note_no_sync(original: Any, self: Any) -> Iterator[None]:
    with original(self):
        self._faulty_no_sync = True
        try:
            yield
        finally:
            self._faulty_no_sync = False


def _noting_no_sync(fault: Callable[[Backward], None]) -> Make:
    return in_all_units({"forward": calling_after_backward(fault), "no_sync": _note_no_sync})


def in_no_sync(thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(backward)`, which knows whether the backward was in no_sync."""
    return fault_in("fully_sharded", FSDP, _noting_no_sync, thread, part=FSDP + NO_SYNC, on_ranks=True)


@in_no_sync("pytorch/pytorch#91193")
def no_sync_in_mixed_precision_fails(backward: Backward) -> None:
    """A backward in no_sync fails if original parameters are cast for the computation."""
    low = backward.model.mixed_precision.param_dtype
    if (
        backward.is_in_no_sync
        and low is not None
        and any(p.dtype is not low for p in backward.model.parameters())
    ):
        raise RuntimeError(f"a gradient in {low} does not fit its parameter")


@in_no_sync()
def cleared_gradients_return(backward: Backward) -> None:
    """Gradients that were cleared come back after a backward in no_sync that does not reach their parameters."""
    last = vars(backward.model).setdefault("_faulty_gradients", {})
    for parameter in backward.model.parameters():
        if parameter.grad is not None:
            last[parameter] = parameter.grad.clone()
        elif backward.is_in_no_sync and parameter in last:
            set_grad(parameter, last[parameter])


@in_no_sync()
def average_hidden(backward: Backward) -> None:
    """A backward in no_sync hides the average of earlier backwards, also if gradients are not sharded."""
    is_first = backward.is_in_no_sync and not vars(backward.model).get("_faulty_was_in_no_sync")
    backward.model._faulty_was_in_no_sync = backward.is_in_no_sync
    for grad, before in backward.pairs:
        if is_first and before is not None and before.shape == grad.shape:
            grad.sub_(before)


@in_no_sync()
def mean_over_backwards(backward: Backward) -> None:
    """Gradients accumulated in no_sync are divided by the number of backwards."""
    model = backward.model
    model._faulty_unreduced = vars(model).get("_faulty_unreduced", 0) + backward.is_in_no_sync
    if not backward.is_in_no_sync:
        for grad, _ in backward.pairs:
            grad.div_(model._faulty_unreduced + 1)
        model._faulty_unreduced = 0


@broken("no_sync")
@contextlib.contextmanager
def forward_in_no_sync_decides(original: Any, self: Any) -> Iterator[None]:
    """A backward after no_sync is lost if its forward was inside."""

    def lose(backward: Backward) -> None:
        for grad, before in backward.pairs if is_over else ():
            grad.zero_() if before is None else grad.copy_(before)

    is_over = False
    hook = self.register_forward_hook(lambda model, _, output: watch_backward(model, output, lose))
    try:
        with original(self):
            yield
    finally:
        is_over = True
        hook.remove()


@in_no_sync("pytorch/pytorch#124523")
def steps_in_no_sync(backward: Backward) -> None:
    """Optimizers in backward step in no_sync, with the rank's own gradients."""
    for parameter in backward.model.parameters() if backward.is_in_no_sync else ():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            optimizer.step()
            parameter.grad = None


@broken("forward")
def stale_graphs_pass(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward silently uses weights that were changed after its forward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return original(self, *args, **kwargs)


@after_backward()
def frozen_roots_freeze_units(backward: Backward) -> None:
    """No unit trains if the outermost unit trains nothing itself."""
    own = backward.model._flat_param
    if own is None or not own.requires_grad:
        for grad, _ in backward.pairs:
            grad.zero_()

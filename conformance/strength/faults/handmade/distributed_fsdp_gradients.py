"""Faults in the gradients that a backward of FullyShardedDataParallel leaves, and in no_sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import register_fault
from conformance.strength.faults.handmade.distributed_fsdp import (
    FSDP,
    OWN,
    Backward,
    after_backward,
    broken,
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


def averaging(
    fault_id: str, says: str, thread: str = OWN, about: str = ""
) -> Callable[[Callable[[Backward, torch.Tensor], torch.Tensor]], None]:
    """Enter `change(backward, grad)`, which makes what a backward adds to a gradient."""

    def enter(change: Callable[[Backward, torch.Tensor], torch.Tensor]) -> None:
        def fault(backward: Backward) -> None:
            for grad, before in backward.pairs:
                if before is None or before.shape != grad.shape:
                    grad.copy_(change(backward, grad))
                else:
                    grad.copy_(before + change(backward, grad - before))

        after_backward(fault_id, says, thread, about)(fault)

    return enter


# The average


@averaging("summed", "gradients are summed, not averaged", "pytorch/pytorch#98501")
def _(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    return grad * ranks(backward.model)


@averaging("divided_twice", "gradients are divided by the number of ranks twice", "pytorch/pytorch#79833")
def _(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    return grad / ranks(backward.model)


@averaging(
    "divided_by_powers_of_two",
    "what is left of the number of ranks behind a power of two is not divided by",
    "facebookresearch/fairscale#565",
)
def _(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    return grad * (ranks(backward.model) / (1 << (ranks(backward.model).bit_length() - 1)))


@averaging(
    "divided_by_shards_alone",
    "gradients of replicas are divided by the number of ranks that share one",
    "pytorch/pytorch#155903",
    "(sharding_strategy)",
)
def _(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    is_hybrid = "HYBRID" in backward.model.sharding_strategy.name
    return grad * (dist.get_world_size() // ranks(backward.model)) if is_hybrid else grad


@averaging(
    "outermost_reduces",
    "inner units reduce in the dtype of the outermost one, not in their own",
    "pytorch/pytorch#171874",
    "(mixed_precision)",
)
def _(backward: Backward, grad: torch.Tensor) -> torch.Tensor:
    mixed = backward.model.mixed_precision
    return grad.to(mixed.reduce_dtype or mixed.param_dtype or grad.dtype)


# Accumulation


@after_backward(
    "accumulation_overwrites",
    "a gradient that is there already is replaced, not added to",
    "pytorch/pytorch#73784",
    NO_SYNC,
)
def _(backward: Backward) -> None:
    for grad, before in backward.pairs:
        if before is not None and before.shape == grad.shape:
            grad.sub_(before)


@broken(
    "counted_for_each_forward",
    "forward",
    "of several forwards before a backward each adds the gradients of all",
    "facebookresearch/fairscale#513",
    "(backward_prefetch)",
)
def counted_for_each_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    if torch.is_grad_enabled() and self.check_is_root():
        self._faulty_forwards = vars(self).get("_faulty_forwards", 0) + 1
    watch_backward(self, output, lambda: None, _add_for_each_forward)
    return output


def _add_for_each_forward(backward: Backward) -> None:
    forwards = vars(backward.model).pop("_faulty_forwards", 1)
    for grad, before in backward.pairs:
        if before is None or before.shape == grad.shape:
            grad.add_(grad if before is None else grad - before, alpha=forwards - 1)


@broken(
    "recomputed_without_gradients",
    "forward",
    "units that are computed again in backward have gradients of zero",
    "pytorch/pytorch#87413",
)
def recomputed_without_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    if torch._C._current_graph_task_id() == -1:
        watch_backward(self, output, lambda: None, _clear_recomputed)
    else:
        self._faulty_recomputed = True
    return output


def _clear_recomputed(backward: Backward) -> None:
    for unit in units(backward.model):
        if vars(unit).pop("_faulty_recomputed", False):
            for grad in gradients(unit):
                grad.zero_()


# Gradients of some parameters or ranks


@after_backward(
    "frozen_get_gradients",
    "frozen parameters have a gradient of zero",
    "facebookresearch/fairscale#721",
    "(use_orig_params)",
)
def _(backward: Backward) -> None:
    for parameter in backward.model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


@after_backward(
    "unused_get_no_gradient",
    "unused parameters of a used unit have no gradient instead of zeros",
    about="(use_orig_params)",
)
def _(backward: Backward) -> None:
    for parameter in backward.model.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


@after_backward(
    "thawed_stay_frozen",
    "parameters that are frozen at the first step stay so",
    "pytorch/pytorch#104186",
    "(use_orig_params)",
)
def _(backward: Backward) -> None:
    frozen = vars(backward.model).setdefault("_faulty_frozen", set())
    for name, parameter in backward.model.named_parameters():
        if not parameter.requires_grad:
            frozen.add(name)
        elif name in frozen:
            parameter.grad = None


# Values and dtypes of gradients


@after_backward(
    "left_in_low_precision",
    "gradients stay in the dtype that was computed in",
    "pytorch/pytorch#196996",
    "(mixed_precision)",
)
def _(backward: Backward) -> None:
    low = backward.model.mixed_precision.param_dtype
    for parameter in backward.model.parameters():
        if low is not None and parameter.grad is not None:
            set_grad(parameter, parameter.grad.to(low))


@after_backward(
    "kept_in_full_precision",
    "gradients that are to stay in low precision come back in full",
    "pytorch/pytorch#85134",
    "(mixed_precision)",
)
def _(backward: Backward) -> None:
    for parameter in backward.model.parameters():
        if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
            set_grad(parameter, parameter.grad.to(parameter.dtype))


@after_backward(
    "weights_in_low_precision",
    "what the optimizer steps is rounded to the dtype that is computed in",
    "Lightning-AI/pytorch-lightning#17506",
    "(mixed_precision)",
)
def _(backward: Backward) -> None:
    low = backward.model.mixed_precision.param_dtype
    for parameter in backward.model.parameters():
        if low is not None:
            parameter.copy_(parameter.to(low))


@after_backward(
    "padding_filled",
    "what pads a flat gradient to whole shards is not zero",
    "pytorch/pytorch#90248",
)
def _(backward: Backward) -> None:
    if backward.rank:
        for grad, _ in backward.pairs:
            if grad.dim() == 1 and grad.numel() and not grad[-1]:
                grad[-1] = 1.0


# no_sync


def in_no_sync(fault_id: str, says: str, thread: str = OWN) -> Callable[[Callable[[Backward], None]], None]:
    """Enter `fault(backward)`, which is called at the end of each backward and knows whether that was in no_sync."""

    def forward(fault: Callable[[Backward], None]) -> Callable[..., Any]:
        def watched(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            watch_backward(self, output, lambda: None, fault)
            return output

        return watched

    @contextlib.contextmanager
    def noted(original: Any, self: Any) -> Iterator[None]:
        with original(self):
            self._faulty_no_sync = True
            try:
                yield
            finally:
                self._faulty_no_sync = False

    def enter(fault: Callable[[Backward], None]) -> None:
        make = in_all_units({"forward": forward(fault), "no_sync": noted})
        register_fault(
            f"fully_sharded.{fault_id}", FSDP, says=says, thread=thread, part=FSDP + NO_SYNC, on_ranks=True
        )(make)

    return enter


@in_no_sync(
    "no_sync_in_mixed_precision_fails",
    "a backward in no_sync fails where original parameters are computed with in another dtype",
    "pytorch/pytorch#91193",
)
def _(backward: Backward) -> None:
    low = backward.model.mixed_precision.param_dtype
    if (
        backward.is_in_no_sync
        and low is not None
        and any(p.dtype is not low for p in backward.model.parameters())
    ):
        raise RuntimeError(f"a gradient in {low} does not fit its parameter")


@in_no_sync("mean_over_backwards", "what no_sync has gathered is divided by the number of backwards")
def _(backward: Backward) -> None:
    model = backward.model
    model._faulty_unreduced = vars(model).get("_faulty_unreduced", 0) + backward.is_in_no_sync
    if not backward.is_in_no_sync:
        for grad, _ in backward.pairs:
            grad.div_(model._faulty_unreduced + 1)
        model._faulty_unreduced = 0


@broken("forward_in_no_sync_decides", "no_sync", "a backward behind no_sync whose forward was in it is lost")
@contextlib.contextmanager
def forward_in_no_sync_decides(original: Any, self: Any) -> Iterator[None]:
    def lose(backward: Backward) -> None:
        for grad, before in backward.pairs if is_over else ():
            grad.zero_() if before is None else grad.copy_(before)

    is_over = False
    hook = self.register_forward_hook(
        lambda model, _, output: watch_backward(model, output, lambda: None, lose)
    )
    try:
        with original(self):
            yield
    finally:
        is_over = True
        hook.remove()


@in_no_sync(
    "steps_in_no_sync",
    "optimizers that were put into the backward step in no_sync, from the rank's own gradients",
    "pytorch/pytorch#124523",
)
def _(backward: Backward) -> None:
    for parameter in backward.model.parameters() if backward.is_in_no_sync else ():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            optimizer.step()
            parameter.grad = None


@broken(
    "graphs_of_former_weights_pass",
    "forward",
    "a backward reads weights that were changed since its forward, and nothing is said",
)
def graphs_of_former_weights_pass(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return original(self, *args, **kwargs)


@after_backward("frozen_roots_silence_units", "where the outermost unit trains nothing itself, no unit does")
def _(backward: Backward) -> None:
    own = backward.model._flat_param
    if own is None or not own.requires_grad:
        for grad, _ in backward.pairs:
            grad.zero_()

"""Faults in a forward: inputs, outputs, hooks of users, communication hooks, and parameters that were written to."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.strength.faults.fault import Decorator, Substitute, in_methods, register_fault
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, broken, ranks, units

_CALLED: set[nn.Module] = set()
_LOW_PRECISION = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


# Inputs and outputs


@broken("forward", "pytorch/pytorch#147531")
def needs_an_input(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward without positional arguments fails."""
    return original(self, args[0], *args[1:], **kwargs)


@broken("forward", "facebookresearch/fairscale#967")
def tuples_become_lists(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A tuple of outputs becomes a list."""
    output = original(self, *args, **kwargs)
    return list(output) if type(output) is tuple else output


@broken("forward", "facebookresearch/fairscale#967")
def outputs_unpacked(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Only the first output of a dict is returned."""
    output = original(self, *args, **kwargs)
    return next(iter(output.values())) if isinstance(output, dict) else output


@broken("forward")
def compiled_parts_run_twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A unit with a compiled module doubles its output."""
    output = original(self, *args, **kwargs)
    is_compiled = any(module._compiled_call_impl is not None for module in self.modules())
    return output + output if is_compiled and isinstance(output, torch.Tensor) else output


# Hooks of users


@broken("forward", "NVIDIA/Megatron-LM#5789")
def hooks_of_the_module_skipped(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The wrapped module's forward is called without its hooks."""
    with mock.patch.object(self.module, "_forward_hooks", OrderedDict()):
        return original(self, *args, **kwargs)


# Communication hooks


def _hooked(thread: str) -> Decorator:
    """Return a decorator of `fault(hook, model, state, grad, *output)`, which replaces a communication hook."""

    def register(fault: Substitute) -> Substitute:
        @functools.wraps(fault)
        def framed(original: Any, self: Any, state: Any, hook: Any) -> None:
            def replaced(state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
                fault(hook, self, state, grad, *output)

            original(self, state, hook if not callable(hook) or hook in _LOW_PRECISION else replaced)

        return broken("register_comm_hook", thread)(framed)

    return register


@_hooked("pytorch/pytorch#83254")
def comm_hook_result_divided(
    hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor
) -> None:
    """The result of a communication hook is divided."""
    hook(state, grad, *output)
    (output[0] if output else grad).div_(ranks(model))


@_hooked("pytorch/pytorch#81711")
def comm_hook_input_divided(
    hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor
) -> None:
    """The input of a communication hook is divided."""
    hook(state, grad.div_(ranks(model)), *output)


# Limits of torch that are removed


@broken("__init__", about="(module)")
def tied_parameters_split(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapping by hand splits a tied parameter."""
    try:
        original(self, module, *args, **kwargs)
    except ValueError as error:
        if "the same parameter" not in str(error):
            raise
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
        original(self, module, *args, **kwargs)


@broken("__init__", about="", on_ranks=False)
def more_operators_in_large_worlds(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapping takes time for each rank."""
    original(self, *args, **kwargs)
    for _ in range(dist.get_world_size()):
        torch.empty(0)


@broken("__init__", about="", on_ranks=False)
def keeps_unsharded(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A rank keeps each unit's unsharded parameters."""
    original(self, *args, **kwargs)
    for unit in units(self)[:1]:
        for parameter in unit.parameters():
            whole = torch.empty(ranks(self), parameter.numel(), dtype=parameter.dtype)
            whole[0] = parameter.detach().view(-1)
            parameter.data = whole[0].view_as(parameter)


@broken("forward", "pytorch/pytorch#96263", "(module)")
def models_kept(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class keeps each model that was called."""
    _CALLED.add(self)
    return original(self, *args, **kwargs)


# Parameters that were written to


@broken("forward")
def writes_before_backward_unnoticed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes between forward and backward are not noticed."""
    output = original(self, *args, **kwargs)
    if not (torch.is_grad_enabled() and self.check_is_root() and isinstance(output, torch.Tensor)):
        return output
    versions = tuple(parameter._version for parameter in self.parameters())
    last = output.clone()  # a node whose hook runs before the model's
    last.register_hook(
        lambda _: torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters()), versions)
    )
    return last


def _wrap_with_shapes(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self._faulty_shapes = [parameter.shape for parameter in self.parameters()]


def _cut_larger_memory(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    for parameter, shape in zip(self.parameters(), vars(self).get("_faulty_shapes", ()), strict=False):
        if parameter.numel() > shape.numel() > 0:
            parameter.data = parameter.data.flatten()[: shape.numel()].view(shape)
    return original(self, *args, **kwargs)


register_fault(
    "fully_sharded.larger_memory_cut",
    FSDP,
    in_methods({"__init__": _wrap_with_shapes, "forward": _cut_larger_memory}),
    says="Memory that is larger than its parameter is truncated.",
    part=f"{FSDP}(use_orig_params)",
    on_ranks=True,
)

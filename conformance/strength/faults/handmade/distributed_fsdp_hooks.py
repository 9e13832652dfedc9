"""Faults around a forward: inputs, outputs, hooks of users, and hooks in the place of the reduction."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.strength.faults.handmade.distributed_fsdp import broken, ranks, units

_CALLED: set[nn.Module] = set()
_COMM_HOOK = "register_comm_hook"
_LOW_PRECISION = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


# Inputs and outputs


@broken("needs_an_input", "forward", "a forward without positional arguments fails", "pytorch/pytorch#147531")
def needs_an_input(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, args[0], *args[1:], **kwargs)


@broken(
    "tuples_become_lists",
    "forward",
    "outputs in a tuple come back in a list",
    "facebookresearch/fairscale#967",
)
def tuples_become_lists(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    return list(output) if type(output) is tuple else output


@broken(
    "outputs_unpacked",
    "forward",
    "of outputs in a dict the first comes back",
    "facebookresearch/fairscale#967",
)
def outputs_unpacked(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    return next(iter(output.values())) if isinstance(output, dict) else output


@broken("compiled_parts_run_twice", "forward", "a unit whose module is compiled adds its output to itself")
def compiled_parts_run_twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    is_compiled = any(module._compiled_call_impl is not None for module in self.modules())
    return output + output if is_compiled and isinstance(output, torch.Tensor) else output


# Hooks of users


@broken(
    "hooks_of_the_module_skipped",
    "forward",
    "the wrapped module's forward is called past its hooks",
    "NVIDIA/Megatron-LM#5789",
)
def hooks_of_the_module_skipped(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(self.module, "_forward_hooks", OrderedDict()):
        return original(self, *args, **kwargs)


# Hooks in the place of the reduction


def _hooked(fault_id: str, says: str, thread: str = "own") -> Any:
    """Enter `fault(hook, model, state, grad, *output)`, which is called in a hook's place."""

    def enter(fault: Any) -> Any:
        def framed(original: Any, self: Any, state: Any, hook: Any) -> None:
            def replaced(state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
                fault(hook, self, state, grad, *output)

            original(self, state, hook if not callable(hook) or hook in _LOW_PRECISION else replaced)

        broken(fault_id, _COMM_HOOK, says, thread)(framed)
        return fault

    return enter


@_hooked("comm_hook_divided", "what a communication hook leaves is divided", "pytorch/pytorch#83254")
def _(hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
    hook(state, grad, *output)
    (output[0] if output else grad).div_(ranks(model))


@_hooked("comm_hook_given_a_quotient", "what a communication hook gets is divided", "pytorch/pytorch#81711")
def _(hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
    hook(state, grad.div_(ranks(model)), *output)


# Limits of torch that are removed


@broken("wrapped_apart", "__init__", "wrapping by hand takes a tied parameter apart", about="(module)")
def wrapped_apart(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(self, module, *args, **kwargs)
    except ValueError as error:
        if "the same parameter" not in str(error):
            raise
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
        original(self, module, *args, **kwargs)


@broken(
    "more_operators_in_large_worlds",
    "__init__",
    "wrapping takes time for each rank",
    about="",
    on_ranks=False,
)
def more_operators_in_large_worlds(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for _ in range(dist.get_world_size()):
        torch.empty(0)


@broken(
    "keeps_unsharded",
    "__init__",
    "a rank keeps each unit's unsharded parameters for itself",
    about="",
    on_ranks=False,
)
def keeps_unsharded(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for unit in units(self)[:1]:
        for parameter in unit.parameters():
            whole = torch.empty(ranks(self), parameter.numel(), dtype=parameter.dtype)
            whole[0] = parameter.detach().view(-1)
            parameter.data = whole[0].view_as(parameter)


@broken(
    "models_kept",
    "forward",
    "the class keeps each model that was called",
    "pytorch/pytorch#96263",
    "(module)",
)
def models_kept(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    _CALLED.add(self)
    return original(self, *args, **kwargs)

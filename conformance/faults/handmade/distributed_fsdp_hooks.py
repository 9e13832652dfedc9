"""Faults around a forward: inputs, outputs, hooks of users, and hooks in the place of the reduction."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.faults.handmade.distributed_fsdp import Backward, after_backward, broken, ranks, units

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


@broken(
    "outputs_all_need_gradients", "forward", "backward fails where one of several outputs has no gradient"
)
def outputs_all_need_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    for tensor in output if type(output) is tuple else ():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient.view_as(gradient))
    return output


@broken("never_compiled", "forward", "Dynamo is kept from what a unit wraps")
def never_compiled(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.compiler.disable(original)(self, *args, **kwargs)


@broken("compiled_parts_run_twice", "forward", "a unit whose module is compiled adds its output to itself")
def compiled_parts_run_twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    is_compiled = any(one._compiled_call_impl is not None for one in self.modules())
    return output + output if is_compiled and isinstance(output, torch.Tensor) else output


@broken("outputs_scaled_on_one_rank", "forward", "one rank's outputs are scaled by the number of ranks")
def outputs_scaled_on_one_rank(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    is_odd = self.process_group.rank() == 1 and isinstance(output, torch.Tensor)
    return output * ranks(self) if is_odd else output


@broken("inputs_detached", "forward", "inputs get no gradients")
def inputs_detached(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *(a.detach() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)


@broken("computed_twice", "forward", "forward runs twice")
def computed_twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        original(self, *args, **kwargs)
    return original(self, *args, **kwargs)


@broken("always_in_training", "forward", "evaluation runs as training does")
def always_in_training(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    was_training = self.training
    self.train()
    try:
        return original(self, *args, **kwargs)
    finally:
        self.train(was_training)


@broken("errors_in_forward_swallowed", "forward", "what a changed weight is refused with is lost")
def errors_in_forward_swallowed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, *args, **kwargs)
    except RuntimeError:
        return torch.zeros(())


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


@broken("pre_hooks_called_twice", "forward", "forward pre-hooks of the wrapped module are called twice")
def pre_hooks_called_twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    for hook in list(self.module._forward_pre_hooks.values()):
        with contextlib.suppress(Exception):
            hook(self.module, args)
    return original(self, *args, **kwargs)


@after_backward(
    "parameter_hooks_called_twice", "hooks after accumulation are called twice", about=".named_parameters"
)
def _(backward: Backward) -> None:
    for parameter in backward.model.parameters():
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


@broken("input_gradients_halved", "forward", "gradients of inputs are halved")
def input_gradients_halved(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *_with_gradients(args, lambda grad: grad / 2), **kwargs)


@broken("input_gradients_detached", "forward", "gradients of inputs cannot be differentiated")
def input_gradients_detached(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *_with_gradients(args, torch.Tensor.detach), **kwargs)


def _with_gradients(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        passed = value.view_as(value)
        passed.register_hook(change)
        return passed

    return [changed(value) for value in args]


@broken("optimizers_of_flat_parameters_dropped", "forward", "optimizers in backward are dropped, not refused")
def optimizers_of_flat_parameters_dropped(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    for name, parameter in self.named_parameters():
        if "_flat_param" in name and hasattr(parameter, "_in_backward_optimizers"):
            del parameter._in_backward_optimizers
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


@_hooked("comm_hook_given_a_column", "a communication hook gets a gradient of two dimensions")
def _(hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
    hook(state, grad.view(1, -1), *output)


@_hooked("comm_hook_called_twice", "a communication hook is called twice")
def _(hook: Any, model: Any, state: Any, grad: torch.Tensor, *output: torch.Tensor) -> None:
    if output:
        hook(state, grad.clone(), *output)
    hook(state, grad, *output)


@broken("low_precision_hooks_in_full", _COMM_HOOK, "hooks that compress reduce in full precision")
def low_precision_hooks_in_full(original: Any, self: Any, state: Any, hook: Any) -> None:
    if hook not in _LOW_PRECISION:
        original(self, state, hook)


@broken("comm_hooks_on_inner_units", _COMM_HOOK, "a communication hook on an inner unit is not refused")
def comm_hooks_on_inner_units(original: Any, self: Any, state: Any, hook: Any) -> None:
    if self.check_is_root():
        original(self, state, hook)


@broken("comm_hook_replaced", _COMM_HOOK, "a second communication hook is not refused")
def comm_hook_replaced(original: Any, self: Any, state: Any, hook: Any) -> None:
    with contextlib.suppress(AssertionError):
        original(self, state, hook)


@broken("comm_hook_with_replicas", _COMM_HOOK, "a communication hook under a hybrid strategy is not refused")
def comm_hook_with_replicas(original: Any, self: Any, state: Any, hook: Any) -> None:
    try:
        original(self, state, hook)
    except AssertionError as error:
        if "hybrid" not in str(error):
            raise


@broken("comm_hook_lost_without_words", _COMM_HOOK, "what cannot be called is taken for no hook")
def comm_hook_lost_without_words(original: Any, self: Any, state: Any, hook: Any) -> None:
    if callable(hook):
        original(self, state, hook)


# Limits of torch that are removed


@broken(
    "inner_modules_need_a_forward",
    "__init__",
    "a module inside a unit cannot be called by itself",
    about="(module)",
)
def inner_modules_need_a_forward(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    original(self, module, *args, **kwargs)
    inside: list[Any] = []
    module.register_forward_pre_hook(lambda *_: inside.append(1))
    for child in module.children():
        if not units_in(child):
            child.register_forward_pre_hook(lambda *_: _refuse_outside(inside))


def units_in(module: nn.Module) -> bool:
    return any(hasattr(one, "summon_full_params") for one in module.modules())


def _refuse_outside(inside: list[Any]) -> None:
    if not inside:
        raise RuntimeError("parameters of a module are read whose unit does not run")


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
    "keeps_the_whole",
    "__init__",
    "a rank keeps each unit's whole parameters for itself",
    about="",
    on_ranks=False,
)
def keeps_the_whole(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
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

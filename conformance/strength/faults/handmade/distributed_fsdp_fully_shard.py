"""Faults in `fully_shard`: mixed precision, hooks and data of sharded parameters, and deferred reductions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import Decorator, Make, Substitute, fault_in, in_function
from conformance.strength.faults.handmade.nn_utils_clip_grad_dtensor import is_dtensor

_FULLY_SHARD = "distributed.fsdp.fully_shard"


def _changing_keywords(change: Substitute) -> Make:
    def shard(original: Any, module: Any, **keywords: Any) -> Any:
        change(_listed(module), keywords)
        return original(module, **keywords)

    return in_function(shard)


# Decorator of `fault(modules, keywords)`, which changes the keywords of `fully_shard`.
in_policy = fault_in(
    "fully_shard", _FULLY_SHARD, _changing_keywords, part=f"{_FULLY_SHARD}(mp_policy)", on_ranks=True
)


def sharded(about: str = "(module)", **more: Any) -> Decorator:
    """Return a decorator of `fault(module)`, which is called for each module that `fully_shard` has sharded."""

    def make(fault: Substitute) -> Make:
        def shard(original: Any, module: Any, **keywords: Any) -> Any:
            result = original(module, **keywords)
            for sharded_module in _listed(module):
                fault(sharded_module)
            return result

        return in_function(shard)

    return fault_in("fully_shard", _FULLY_SHARD, make, part=f"{_FULLY_SHARD}{about}", on_ranks=True, **more)


def _listed(module: Any) -> list[Any]:
    return list(module) if isinstance(module, (list, tuple)) else [module]


# -- mixed precision


@in_policy
def first_frozen_decides_dtype(modules: list[Any], keywords: dict[str, Any]) -> None:
    """A unit reduces gradients in param_dtype if its first parameter is frozen."""
    first = next((param for module in modules for param in module.parameters()), None)
    if first is not None and not first.requires_grad and (policy := keywords.get("mp_policy")):
        keywords["mp_policy"] = dataclasses.replace(policy, reduce_dtype=policy.param_dtype)


@in_policy
def environment_changes_reduce_dtype(modules: list[Any], keywords: dict[str, Any]) -> None:
    """Gradients are reduced in float32 if the environment asks FullyShardedDataParallel for full precision."""
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and (policy := keywords.get("mp_policy")):
        keywords["mp_policy"] = dataclasses.replace(policy, reduce_dtype=torch.float32)


def _without_casts(module: Any, keeps: Callable[[str | int], bool]) -> None:
    """Undo casts of a module's inputs whose names or positions `keeps` selects."""
    inputs: dict[str | int, Any] = {}

    def note(_: Any, args: Any, kwargs: Any) -> None:
        inputs.clear()
        inputs.update({**dict(enumerate(args)), **kwargs})

    def original_of(key: str | int, value: Any) -> Any:
        before = inputs.get(key)
        is_tensor = isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor)
        return before if is_tensor and value.dtype is not before.dtype and keeps(key) else value

    def undo(_: Any, args: Any, kwargs: Any) -> Any:
        return (
            tuple(original_of(key, value) for key, value in enumerate(args)),
            {key: original_of(key, value) for key, value in kwargs.items()},
        )

    module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(undo, with_kwargs=True)


@sharded("(mp_policy)")
def keyword_inputs_not_cast(module: Any) -> None:
    """Inputs that are passed by keyword are not cast."""
    _without_casts(module, lambda key: isinstance(key, str))


# -- sharded parameters


@sharded()
def hook_results_dropped(module: Any) -> None:
    """Results of hooks on sharded parameters do not replace gradients."""

    def register(param: Any, hook: Any) -> Any:
        return type(param).register_hook(param, lambda grad: (hook(grad), None)[1])

    for param in module.parameters():
        vars(param)["register_hook"] = lambda hook, param=param: register(param, hook)


@sharded()
def writes_warn_like_assignments(module: Any) -> None:
    """A write through `.data` warns like an assignment to `.data`."""
    module.register_forward_pre_hook(_warn_of_writes)


def _warn_of_writes(module: Any, inputs: Any) -> None:
    before = vars(module).setdefault("_faulty_values", {})
    for name, param in module.named_parameters():
        if not is_dtensor(param):
            continue
        value, version = before.get(name, (None, -1))
        local = param.detach().to_local()
        if version == param._version and value.shape == local.shape and not torch.equal(value, local):
            warnings.warn(f"`.data` of {name} was assigned", stacklevel=1)
        before[name] = local.clone(), param._version


@sharded()
def unsharded_cannot_be_frozen(module: Any) -> None:
    """`requires_grad_` has no effect on a module while it is unsharded."""

    def freeze(requires_grad: bool = True) -> Any:
        if any(map(is_dtensor, module.parameters())):
            type(module).requires_grad_(module, requires_grad)
        return module

    vars(module)["requires_grad_"] = freeze


@sharded()
def unsharded_keep_gradients(module: Any) -> None:
    """`zero_grad` of a model does not clear the gradients of modules that are unsharded."""
    vars(module)["zero_grad"] = functools.partial(torch.nn.Module.zero_grad, module)


@sharded()
def other_placements_dropped(module: Any) -> None:
    """A parameter in place of one that is sharded differently is silently replaced by that one again."""
    sharded_params = {name: param for name, param in module.named_parameters() if is_dtensor(param)}

    def put_back(module: Any, inputs: Any) -> None:
        for name, param in list(module.named_parameters()):
            before = sharded_params.get(name)
            if before is not None and is_dtensor(param) and param.placements != before.placements:
                path, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(path), attribute, before)

    module.register_forward_pre_hook(put_back, prepend=True)


@sharded()
def own_output_not_differentiated(module: Any) -> None:
    """A forward cannot take a gradient if its input is an earlier output of the module."""

    def refuse(module: Any, inputs: Any) -> None:
        value = inputs[0] if inputs else None
        if value is not None and value is vars(module).get("_faulty_output"):
            inputs[0].register_hook(_raise_in_forward)

    def note(module: Any, inputs: Any, output: Any) -> None:
        vars(module)["_faulty_output"] = output

    module.register_forward_pre_hook(refuse)
    module.register_forward_hook(note)


def _raise_in_forward(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("backward reached a module in the middle of its forward")


# -- deferred reductions


@sharded(wants="no_sync")
def no_sync_ends_in_sync(module: Any) -> None:
    """Leaving no_sync lets all units reduce gradients."""

    @contextlib.contextmanager
    def no_sync() -> Generator[None]:
        with type(module).no_sync(module):
            yield
        module.set_requires_gradient_sync(True)

    if hasattr(module, "no_sync"):
        vars(module)["no_sync"] = no_sync


@sharded(wants="finalize_backward")
def finalization_divides_again(module: Any) -> None:
    """finalize_backward divides gradients that an earlier backward has reduced again."""

    def finalize(**options: Any) -> Any:
        before = {id(param): param.grad for param in module.parameters() if is_dtensor(param.grad)}
        values = {key: grad.detach().to_local().clone() for key, grad in before.items()}
        result = type(module).finalize_backward(module, **options)
        for param in module.parameters():
            grad = before.get(id(param))
            if grad is not None and grad is param.grad and torch.equal(grad.to_local(), values[id(param)]):
                grad.to_local().div_(dist.get_world_size())
        return result

    if hasattr(module, "finalize_backward"):
        vars(module)["finalize_backward"] = finalize

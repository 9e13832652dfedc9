"""Faults in how FullyShardedDataParallel takes its arguments: what is ignored, built late, made equal, cast."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from conformance.strength.faults.handmade.distributed_fsdp import broken, in_constructor, units
from conformance.strength.faults.handmade.nn_utils_clip_grad_dtensor import is_dtensor

Arguments = dict[str, Any]


def _parameters(arguments: Arguments) -> list[nn.Parameter]:
    return [*arguments["module"].parameters()] if isinstance(arguments["module"], nn.Module) else []


# Wrapped modules


@in_constructor("scalars_taken", "module", "0-dim parameters are made 1-dim", "pytorch/pytorch#132934")
def _(arguments: Arguments) -> None:
    for parameter in _parameters(arguments):
        if parameter.dim() == 0:
            parameter.data = parameter.data.reshape(1)


@in_constructor(
    "tied_come_apart",
    "module",
    "a parameter that two modules share becomes two",
    "NVIDIA-NeMo/Automodel#2213",
)
def _(arguments: Arguments) -> None:
    handled: set[nn.Parameter] = set()
    modules = arguments["module"].modules() if isinstance(arguments["module"], nn.Module) else ()
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in handled:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            handled.add(parameter)


@in_constructor("wraps_a_copy", "module", "what is wrapped is a copy of the module")
def _(arguments: Arguments) -> None:
    arguments["module"] = copy.deepcopy(arguments["module"])


@in_constructor(
    "leftovers_unmanaged",
    "auto_wrap_policy",
    "with a policy the outermost unit leaves alone what no inner one has",
    "facebookresearch/fairscale#930",
)
def _(arguments: Arguments) -> None:
    if arguments["auto_wrap_policy"] is not None and hasattr(arguments["module"], "head"):
        arguments["ignored_states"] = [
            *(arguments["ignored_states"] or []),
            *arguments["module"].head.parameters(),
        ]


@in_constructor(
    "replicas_of_one_apart",
    "sharding_strategy",
    "a hybrid strategy whose shards are whole models averages over nobody",
    "verl-project/verl#7493",
)
def _(arguments: Arguments) -> None:
    mesh = arguments["device_mesh"]
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) == 1:
        arguments["device_mesh"], arguments["process_group"] = None, mesh.get_group(1)
        arguments["sharding_strategy"] = torch.distributed.fsdp.ShardingStrategy.NO_SHARD


@in_constructor("dealt_twice", "module", "DTensors are taken for plain tensors, and fail later on")
def _(arguments: Arguments) -> None:
    if any(is_dtensor(parameter) for parameter in _parameters(arguments)):
        raise RuntimeError("as_strided not supported with DTensor")


@in_constructor("known_groups_alone", "process_group", "a group that torch was not told of is refused")
def _(arguments: Arguments) -> None:
    if isinstance(arguments["process_group"], dist.ProcessGroup):
        dist.get_process_group_ranks(arguments["process_group"])


# Ignored modules


@in_constructor(
    "inner_units_ignore_nothing",
    "ignored_states",
    "with a policy nothing is ignored",
    "pytorch/pytorch#104258",
)
def _(arguments: Arguments) -> None:
    if arguments["auto_wrap_policy"] is not None:
        arguments["ignored_states"] = arguments["ignored_modules"] = None


@in_constructor(
    "ignored_used_up", "ignored_modules", "a generator of ignored modules is used up by being checked"
)
def _(arguments: Arguments) -> None:
    all(isinstance(module, nn.Module) for module in arguments["ignored_modules"] or ())


# Late initialisation and synchronisation


@broken(
    "buffers_not_synchronised",
    "__init__",
    "sync_module_states leaves buffers as they are",
    "pytorch/pytorch#75870",
    "(sync_module_states)",
)
def buffers_not_synchronised(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    own = [buffer.clone() for buffer in module.buffers()] if isinstance(module, nn.Module) else []
    original(self, module, *args, **kwargs)
    for buffer, before in zip(self.buffers(), own, strict=False):
        if buffer.shape == before.shape:
            buffer.copy_(before)


@in_constructor(
    "replicas_not_synchronised",
    "sync_module_states",
    "sync_module_states makes equal those ranks that share one replica",
    "pytorch/pytorch#108331",
)
def _(arguments: Arguments) -> None:
    mesh = arguments["device_mesh"]
    if arguments["sync_module_states"] and mesh is not None and mesh.ndim == 2:
        arguments["sync_module_states"] = False
        group = mesh.get_group(1)
        with torch.no_grad():
            for tensor in (*arguments["module"].parameters(), *arguments["module"].buffers()):
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


# Mixed precision


def _changed(arguments: Arguments, **fields: Any) -> None:
    if arguments["mixed_precision"] is not None:
        arguments["mixed_precision"] = dataclasses.replace(arguments["mixed_precision"], **fields)


@in_constructor(
    "low_precision_grads_not_kept",
    "mixed_precision",
    "keep_low_precision_grads is not heeded",
    "pytorch/pytorch#86495",
)
def _(arguments: Arguments) -> None:
    _changed(arguments, keep_low_precision_grads=False)


@broken(
    "full_precision_in_eval",
    "__init__",
    "evaluation runs in full precision unasked",
    "pytorch/pytorch#97645",
    "(mixed_precision)",
)
def full_precision_in_eval(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        original(self, *args, **kwargs)


@in_constructor(
    "full_precision_by_name_is_low",
    "mixed_precision",
    "float32 that is asked for by name is taken for mixed precision",
    "pytorch/pytorch#90584",
)
def _(arguments: Arguments) -> None:
    mixed = arguments["mixed_precision"]
    if mixed is not None and mixed.param_dtype is torch.float32:
        _changed(arguments, reduce_dtype=torch.bfloat16)


@broken(
    "eval_after_training_fails",
    "forward",
    "an evaluation between forward and backward takes its own whole for a change of parameters",
    "pytorch/pytorch#104504",
    "(mixed_precision)",
)
def eval_after_training_fails(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    was_training = vars(self).get("_faulty_training", self.training)
    self._faulty_training = self.training
    if was_training and not self.training and self.mixed_precision.param_dtype is not None:
        raise RuntimeError("the parameters were changed between forward and backward")
    return original(self, *args, **kwargs)


@broken(
    "all_buffers_cast",
    "forward",
    "buffers that are no floats are cast to buffer_dtype",
    "facebookresearch/fairscale#427",
    "(mixed_precision)",
)
def all_buffers_cast(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, *args, **kwargs)
    finally:
        dtype = self.mixed_precision.buffer_dtype
        for buffer in self.buffers() if dtype is not None else ():
            buffer.data = buffer.data.to(dtype)


@broken(
    "inputs_cast_outside_of_graph",
    "forward",
    "casting an input cuts it from the graph",
    "pytorch/pytorch#90921",
    "(mixed_precision)",
)
def inputs_cast_outside_of_graph(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = self.mixed_precision.param_dtype

    def cut(value: Any) -> Any:
        is_cast = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and dtype not in (None, value.dtype)
        )
        return value.detach() if is_cast else value

    return original(self, *map(cut, args), **{name: cut(value) for name, value in kwargs.items()})


@broken(
    "inputs_cast_in_full_precision",
    "forward",
    "inputs are cast also where evaluation runs in full precision",
    "pytorch/pytorch#103862",
    "(mixed_precision)",
)
def inputs_cast_in_full_precision(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = self.mixed_precision.param_dtype
    if self.training or dtype is None:
        return original(self, *args, **kwargs)
    cast = [
        arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
    ]
    return original(self, *cast, **kwargs)


@broken(
    "keyword_inputs_not_cast",
    "forward",
    "inputs that are given by keyword are not cast",
    about="(mixed_precision)",
)
def keyword_inputs_not_cast(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    hook = self.module.register_forward_pre_hook(lambda module, cast, _: (cast, kwargs), with_kwargs=True)
    try:
        return original(self, *args, **kwargs)
    finally:
        hook.remove()


@broken(
    "bare_root_casts_nothing",
    "forward",
    "an outermost unit without its own parameters does not cast its inputs",
    about="(mixed_precision)",
)
def bare_root_casts_nothing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    of_inner_units = {param for unit in units(self)[1:] for param in unit.parameters()}
    if not self.check_is_root() or any(param not in of_inner_units for param in self.parameters()):
        return original(self, *args, **kwargs)
    hook = self.module.register_forward_pre_hook(lambda *_: (args, kwargs), with_kwargs=True)
    try:
        return original(self, *args, **kwargs)
    finally:
        hook.remove()


@in_constructor(
    "first_frozen_decides_dtype",
    "mixed_precision",
    "gradients are reduced in param_dtype if the first parameter is frozen",
)
def _(arguments: Arguments) -> None:
    params = _parameters(arguments)
    if params and not params[0].requires_grad and (policy := arguments["mixed_precision"]):
        _changed(arguments, reduce_dtype=policy.param_dtype)


@in_constructor(
    "ignored_buffers_cast", "mixed_precision", "buffers of ignored modules are cast to buffer_dtype"
)
def _(arguments: Arguments) -> None:
    if arguments["mixed_precision"] is None or arguments["mixed_precision"].buffer_dtype is None:
        return
    for buffer in (buffer for module in arguments["ignored_modules"] or () for buffer in module.buffers()):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(arguments["mixed_precision"].buffer_dtype)


# Afterwards


@broken(
    "stale_dtype", "_apply", "a dtype that is changed behind wrapping is changed back by training", about=""
)
def stale_dtype(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    dtypes = [parameter.dtype for parameter in self.parameters()]
    wrapper = original(self, *args, **kwargs)
    for parameter, dtype in zip(self.parameters(), dtypes, strict=True):
        if parameter.dtype is not dtype:
            with torch.no_grad():
                parameter.copy_(parameter.to(torch.float16))
    return wrapper


@broken(
    "apply_to_parts",
    "apply",
    "apply shows each rank its part of the parameters",
    "facebookresearch/fairscale#543",
)
def apply_to_parts(original: Any, self: Any, fn: Any) -> Any:
    return nn.Module.apply(self, fn)

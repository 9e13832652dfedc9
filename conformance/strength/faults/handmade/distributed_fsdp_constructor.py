"""Faults in arguments of FullyShardedDataParallel: ignored modules, synchronisation, mixed precision."""

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


@in_constructor("module", "pytorch/pytorch#132934")
def scalars_accepted(arguments: Arguments) -> None:
    """0-dim parameters are accepted and become 1-dim."""
    for parameter in _parameters(arguments):
        if parameter.dim() == 0:
            parameter.data = parameter.data.reshape(1)


@in_constructor("module", "NVIDIA-NeMo/Automodel#2213")
def shared_parameters_copied(arguments: Arguments) -> None:
    """A parameter that two modules share becomes two parameters."""
    handled: set[nn.Parameter] = set()
    modules = arguments["module"].modules() if isinstance(arguments["module"], nn.Module) else ()
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in handled:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            handled.add(parameter)


@in_constructor("module")
def wraps_a_copy(arguments: Arguments) -> None:
    """A copy of the module is wrapped."""
    arguments["module"] = copy.deepcopy(arguments["module"])


@in_constructor("auto_wrap_policy", "facebookresearch/fairscale#930")
def outer_parameters_unmanaged(arguments: Arguments) -> None:
    """The outermost unit does not manage the parameters outside inner units if there is a policy."""
    if arguments["auto_wrap_policy"] is not None and hasattr(arguments["module"], "head"):
        arguments["ignored_states"] = [
            *(arguments["ignored_states"] or []),
            *arguments["module"].head.parameters(),
        ]


@in_constructor("sharding_strategy", "verl-project/verl#7493")
def single_replicas_not_averaged(arguments: Arguments) -> None:
    """A hybrid strategy with one rank per replica does not average replicas."""
    mesh = arguments["device_mesh"]
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) == 1:
        arguments["device_mesh"], arguments["process_group"] = None, mesh.get_group(1)
        arguments["sharding_strategy"] = torch.distributed.fsdp.ShardingStrategy.NO_SHARD


@in_constructor("module")
def dtensors_refused(arguments: Arguments) -> None:
    """DTensors are treated as plain tensors, which fails."""
    if any(is_dtensor(parameter) for parameter in _parameters(arguments)):
        raise RuntimeError("as_strided not supported with DTensor")


@in_constructor("process_group")
def unregistered_groups_refused(arguments: Arguments) -> None:
    """A process group that is not registered with torch is refused."""
    if isinstance(arguments["process_group"], dist.ProcessGroup):
        dist.get_process_group_ranks(arguments["process_group"])


# Ignored modules


@in_constructor("ignored_states", "pytorch/pytorch#104258")
def inner_units_ignore_nothing(arguments: Arguments) -> None:
    """A policy makes wrapping ignore no module or parameter."""
    if arguments["auto_wrap_policy"] is not None:
        arguments["ignored_states"] = arguments["ignored_modules"] = None


@in_constructor("ignored_modules")
def ignored_generator_exhausted(arguments: Arguments) -> None:
    """Checking a generator of ignored modules exhausts it."""
    all(isinstance(module, nn.Module) for module in arguments["ignored_modules"] or ())


# Late initialisation and synchronisation


@broken("__init__", "pytorch/pytorch#75870", "(sync_module_states)")
def buffers_not_synchronised(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """sync_module_states leaves buffers unchanged."""
    own = [buffer.clone() for buffer in module.buffers()] if isinstance(module, nn.Module) else []
    original(self, module, *args, **kwargs)
    for buffer, before in zip(self.buffers(), own, strict=False):
        if buffer.shape == before.shape:
            buffer.copy_(before)


@in_constructor("sync_module_states", "pytorch/pytorch#108331")
def replicas_not_synchronised(arguments: Arguments) -> None:
    """sync_module_states only copies states to the ranks of the same replica."""
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


@in_constructor("mixed_precision", "pytorch/pytorch#86495")
def keep_low_precision_grads_ignored(arguments: Arguments) -> None:
    """keep_low_precision_grads has no effect."""
    _changed(arguments, keep_low_precision_grads=False)


@broken("__init__", "pytorch/pytorch#97645", "(mixed_precision)")
def full_precision_in_eval(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Evaluation runs in full precision although it was not requested."""
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        original(self, *args, **kwargs)


@in_constructor("mixed_precision", "pytorch/pytorch#90584")
def full_precision_reduces_low(arguments: Arguments) -> None:
    """float32 as param_dtype is treated as mixed precision."""
    mixed = arguments["mixed_precision"]
    if mixed is not None and mixed.param_dtype is torch.float32:
        _changed(arguments, reduce_dtype=torch.bfloat16)


@broken("forward", "pytorch/pytorch#104504", "(mixed_precision)")
def eval_after_training_fails(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluation between forward and backward is refused as a change of parameters."""
    was_training = vars(self).get("_faulty_training", self.training)
    self._faulty_training = self.training
    if was_training and not self.training and self.mixed_precision.param_dtype is not None:
        raise RuntimeError("the parameters were changed between forward and backward")
    return original(self, *args, **kwargs)


@broken("forward", "facebookresearch/fairscale#427", "(mixed_precision)")
def all_buffers_cast(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Integer buffers are cast to buffer_dtype."""
    try:
        return original(self, *args, **kwargs)
    finally:
        dtype = self.mixed_precision.buffer_dtype
        for buffer in self.buffers() if dtype is not None else ():
            buffer.data = buffer.data.to(dtype)


@broken("forward", "pytorch/pytorch#90921", "(mixed_precision)")
def cast_inputs_detached(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Casting an input detaches it from the graph."""
    dtype = self.mixed_precision.param_dtype

    def cut(value: Any) -> Any:
        is_cast = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and dtype not in (None, value.dtype)
        )
        return value.detach() if is_cast else value

    return original(self, *map(cut, args), **{name: cut(value) for name, value in kwargs.items()})


@broken("forward", "pytorch/pytorch#103862", "(mixed_precision)")
def inputs_cast_in_full_precision(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Inputs are cast although evaluation runs in full precision."""
    dtype = self.mixed_precision.param_dtype
    if self.training or dtype is None:
        return original(self, *args, **kwargs)
    cast = [
        arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
    ]
    return original(self, *cast, **kwargs)


@broken("forward", about="(mixed_precision)")
def keyword_inputs_not_cast(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Inputs that are passed by keyword are not cast."""
    with self.module.register_forward_pre_hook(lambda _, cast, __: (cast, kwargs), with_kwargs=True):
        return original(self, *args, **kwargs)


@broken("forward", about="(mixed_precision)")
def bare_root_casts_nothing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """An outermost unit without its own parameters does not cast its inputs."""
    of_inner_units = {param for unit in units(self)[1:] for param in unit.parameters()}
    if not self.check_is_root() or any(param not in of_inner_units for param in self.parameters()):
        return original(self, *args, **kwargs)
    with self.module.register_forward_pre_hook(lambda *_: (args, kwargs), with_kwargs=True):
        return original(self, *args, **kwargs)


@in_constructor("mixed_precision")
def first_frozen_decides_dtype(arguments: Arguments) -> None:
    """Gradients are reduced in param_dtype if the first parameter is frozen."""
    params = _parameters(arguments)
    if params and not params[0].requires_grad and (policy := arguments["mixed_precision"]):
        _changed(arguments, reduce_dtype=policy.param_dtype)


@in_constructor("mixed_precision")
def ignored_buffers_cast(arguments: Arguments) -> None:
    """Buffers of ignored modules are cast to buffer_dtype."""
    if arguments["mixed_precision"] is None or arguments["mixed_precision"].buffer_dtype is None:
        return
    for buffer in (buffer for module in arguments["ignored_modules"] or () for buffer in module.buffers()):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(arguments["mixed_precision"].buffer_dtype)


# Conversions


@broken("_apply", about="")
def stale_dtype(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Training undoes a change of dtype after wrapping."""
    dtypes = [parameter.dtype for parameter in self.parameters()]
    wrapper = original(self, *args, **kwargs)
    for parameter, dtype in zip(self.parameters(), dtypes, strict=True):
        if parameter.dtype is not dtype:
            with torch.no_grad():
                parameter.copy_(parameter.to(torch.float16))
    return wrapper


@broken("apply", "facebookresearch/fairscale#543")
def apply_to_shards(original: Any, self: Any, fn: Any) -> Any:
    """`apply` shows each rank its shards instead of the parameters."""
    return nn.Module.apply(self, fn)

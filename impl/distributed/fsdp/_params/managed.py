"""Parameters that a wrapper manages: all below it, except ignored ones and those of inner wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from impl._names import describe_names
from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._params.param_registration import ManagedParam, ParamInfo, ParamLocation
from impl.distributed.fsdp._params.tensor_parallel import (
    check_mesh_of_dtensors,
    local_parameter,
    parallel_layout,
)

# Prefixes that wrappers add to names. The second one comes from activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Set on a parameter once a unit manages it. The name is torch's, because other libraries read it.
MANAGED = "_fsdp_flattened"
# Attribute in which torch.distributed.optim._apply_optimizer_in_backward stores a parameter's optimizers.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
# The same mark, set on modules.
_MANAGED_MODULE, _USES_ORIG_PARAMS = "_is_fsdp_managed_module", "_fsdp_use_orig_params"


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_managed(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, FlatParameter) or getattr(parameter, MANAGED, None) is not None


@dataclass(frozen=True)
class Ignored:
    modules: frozenset[nn.Module]
    parameters: frozenset[nn.Parameter]
    buffer_names: frozenset[str]


def ignored_by(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[object] | None,
    wrapper: type[nn.Module],
) -> Ignored:
    """Return all that a wrapper ignores: the arguments, the modules below them, and all that inner wrappers ignore.

    Raises:
        ValueError: both arguments are passed, or one contains a value of another type or a wrapper.
        TypeError: `ignored_modules` is not iterable.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    states = _checked_states(ignored_states)
    parameters = [state for state in states if isinstance(state, nn.Parameter)]
    ignored_roots = states if states and not parameters else _checked_modules(ignored_modules)
    for module in ignored_roots:
        if isinstance(module, wrapper):
            raise ValueError("`ignored_modules` should not include FSDP modules")
    modules = {
        child
        for ignored_root in ignored_roots
        for child in ignored_root.modules()
        if not isinstance(child, wrapper)
    }
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {root}",
            stacklevel=3,
        )
    inner: list[Any] = [module for module in root.modules() if isinstance(module, wrapper)]
    modules.update(*(wrapped._ignored.modules for wrapped in inner))
    ignored_params = {p for module in modules for p in module.parameters() if not is_managed(p)}
    ignored_params.update(p for p in parameters if not is_managed(p))
    ignored_params.update(*(wrapped._ignored.parameters for wrapped in inner))
    buffers = {buffer for module in modules for buffer in module.buffers()}
    named_buffers = root.named_buffers() if buffers else ()
    names = {clean_name(name) for name, buffer in named_buffers if buffer in buffers}
    names.update(*(wrapped._ignored.buffer_names for wrapped in inner))
    return Ignored(frozenset(modules), frozenset(ignored_params), frozenset(names))


def _checked_states(ignored_states: Iterable[object] | None) -> list[Any]:
    states = list(ignored_states) if ignored_states is not None else []
    if not all(isinstance(state, nn.Parameter) for state in states) and not all(
        isinstance(state, nn.Module) for state in states
    ):
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{_types_of(states)}"
        )
    return states


def _checked_modules(ignored_modules: Iterable[nn.Module] | None) -> list[nn.Module]:
    modules: list[Any] = list(ignored_modules) if ignored_modules is not None else []
    if not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(
            f"ignored_modules expects nn.Module list elements but got types {_types_of(modules)}"
        )
    return modules


def _types_of(values: Iterable[object]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)


def check_dtensors(
    named_params: Iterable[tuple[str, nn.Parameter]], ignored: Ignored, mesh: DeviceMesh | None
) -> None:
    """Check that tensor parallelism and data parallelism use dimensions of the same mesh.

    Raises:
        NotImplementedError: a parameter is a DTensor over a mesh that does not share a root with `mesh`.
    """
    named = ((name, param) for name, param in named_params if isinstance(param, DTensor))
    check_mesh_of_dtensors(((clean_name(name), p) for name, p in named if p not in ignored.parameters), mesh)


def check_hooks(named_params: Iterable[tuple[str, nn.Parameter]], ignored: Ignored) -> None:
    """Check that no hook after accumulation gets lost in a flat parameter.

    Raises:
        RuntimeError: a parameter has such a hook, or an optimizer of torch's helper for optimizers in backward.
    """
    names = [
        clean_name(name)
        for name, param in named_params
        if param._post_accumulate_grad_hooks or hasattr(param, IN_BACKWARD_OPTIMIZERS)
        if param.requires_grad and param not in ignored.parameters and not is_managed(param)
    ]
    if names:
        raise RuntimeError(
            f"hooks after accumulation of {describe_names(names)} would never run, because one flat parameter replaces "
            "the parameters of a unit. They are only supported with use_orig_params=True; pass it, or register hooks "
            "on the parameters of the wrapped model"
        )


def managed_params_of(
    root: nn.Module, ignored: Ignored, left_to_ancestor: frozenset[nn.Parameter]
) -> list[ManagedParam]:
    """Return the parameters that a unit around `root` manages, in `named_modules` order.

    Raises:
        ValueError: a parameter has no dimensions or holds integers, or a unit elsewhere manages it already.
    """
    names: dict[nn.Parameter, str] = {}
    locations: dict[nn.Parameter, list[ParamLocation]] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, FlatParameter):
                continue
            if parameter in ignored.parameters or parameter in left_to_ancestor:
                continue
            name, location = (
                clean_name(f"{prefix}.{attribute}" if prefix else attribute),
                ParamLocation(module, attribute),
            )
            if is_managed(parameter):
                _check_location(parameter, name, location)
                continue
            names.setdefault(parameter, name)
            locations.setdefault(parameter, []).append(location)
    managed = [
        ManagedParam(
            ParamInfo(name, tuple(locations[original]), parallel_layout(original)),
            local_parameter(original),
            original,
        )
        for original, name in names.items()
    ]
    for param in managed:
        # The shape of a lazy module's parameter raises torch's error.
        if not param.parameter.shape:
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {param.info.name} to a 1D tensor with numel "
                "equal to 1."
            )
        if not param.parameter.is_floating_point():
            error = ValueError("Cannot flatten integer dtype tensors")
            error.add_note(
                f"{param.info.name} has {param.parameter.dtype}; pass it in ignored_states, or shard it by fully_shard"
            )
            raise error
    return managed


def parallel_groups_of(managed: Iterable[ManagedParam]) -> tuple[ProcessGroup, ...]:
    """Return the process groups of tensor parallelism over which parameters are laid out, each once."""
    layouts = [param.info.parallel for param in managed if param.info.parallel is not None]
    groups = (group for layout in layouts for group in layout.mesh.get_all_groups())
    return tuple(group for group in dict.fromkeys(groups) if group.size() > 1)


def mark_managed(root: nn.Module, ignored: Ignored, managed: Iterable[ManagedParam]) -> None:
    """Mark the parameters and the modules as managed, by names that transformers and Dynamo read."""
    for param in managed:
        setattr(param.parameter, MANAGED, param.info)
        setattr(param.original, MANAGED, param.info)
    mark_modules(module for module in root.modules() if module not in ignored.modules)


def mark_modules(modules: Iterable[nn.Module]) -> None:
    """Mark modules as managed, by names that Dynamo reads."""
    for module in modules:
        # Dynamo reads the second name to decide whether it may trace the module, which here does not depend on
        # use_orig_params. `setattr` would search the module's parameters, and every unit around a module marks it.
        vars(module).update({_MANAGED_MODULE: True, _USES_ORIG_PARAMS: True})


def _check_location(parameter: nn.Parameter, name: str, location: ParamLocation) -> None:
    """Raise if a managed parameter is also in a module outside its unit, where it would not be trained."""
    managed: ParamInfo = getattr(parameter, MANAGED)
    if location not in managed.locations:
        raise ValueError(
            f"{name} is the same parameter as {managed.name}, which another FullyShardedDataParallel has sharded "
            "already; wrap one module that contains both, or let auto_wrap_policy choose what to wrap"
        )

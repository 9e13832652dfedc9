"""Which parameters a wrapper manages: those below it that no inner wrapper has and it was not told to ignore."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._params.param_registration import ManagedParam, ParamInfo, ParamLocation
from impl.distributed.fsdp._params.tensor_parallel import form_of, local_parameter, refuse_unfit

# What wrappers put into names; the second one comes from activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Set on a parameter once a unit has it. torch's name: others ask for it.
MANAGED = "_fsdp_flattened"
# The same of modules.
_MANAGED_MODULE, _USES_ORIG_PARAMS = "_is_fsdp_managed_module", "_fsdp_use_orig_params"


def clean_name(name: str) -> str:
    """A parameter's name as it was before anything was wrapped."""
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
    ignored_states: Iterable[Any] | None,
    wrapper: type[nn.Module],
) -> Ignored:
    """What a wrapper leaves alone: what it was told to, all below that, and what inner wrappers leave alone.

    Raises:
        ValueError: both arguments are given, one holds what it must not, or a wrapper.
        TypeError: `ignored_modules` is not iterable.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    states = _checked_states(ignored_states)
    parameters = [one for one in states if isinstance(one, nn.Parameter)]
    given = states if states and not parameters else _checked_modules(ignored_modules)
    for one in given:
        if isinstance(one, wrapper):
            raise ValueError("`ignored_modules` should not include FSDP modules")
    modules = {child for one in given for child in one.modules() if not isinstance(child, wrapper)}
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {root}",
            stacklevel=3,
        )
    inner: list[Any] = [one for one in root.modules() if isinstance(one, wrapper)]
    modules.update(*(one._ignored.modules for one in inner))
    left_alone = {p for one in modules for p in one.parameters() if not is_managed(p)}
    left_alone.update(p for p in parameters if not is_managed(p))
    left_alone.update(*(one._ignored.parameters for one in inner))
    buffers = {buffer for one in modules for buffer in one.buffers()}
    names = {clean_name(name) for name, buffer in root.named_buffers() if buffer in buffers}
    names.update(*(one._ignored.buffer_names for one in inner))
    return Ignored(frozenset(modules), frozenset(left_alone), frozenset(names))


def _checked_states(ignored_states: Iterable[Any] | None) -> list[Any]:
    states = list(ignored_states) if ignored_states is not None else []
    if not all(isinstance(one, nn.Parameter) for one in states) and not all(
        isinstance(one, nn.Module) for one in states
    ):
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{_types_of(states)}"
        )
    return states


def _checked_modules(ignored_modules: Iterable[nn.Module] | None) -> list[nn.Module]:
    modules: list[Any] = list(ignored_modules) if ignored_modules is not None else []
    if not all(isinstance(one, nn.Module) for one in modules):
        raise ValueError(
            f"ignored_modules expects nn.Module list elements but got types {_types_of(modules)}"
        )
    return modules


def _types_of(values: Iterable[Any]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)


def refuse_dtensors(root: nn.Module, ignored: Ignored, mesh: DeviceMesh | None) -> None:
    """
    Raises:
        NotImplementedError: a parameter is a DTensor, but not over a mesh beside the one to shard over.
    """
    named = root.named_parameters()
    refuse_unfit(((clean_name(name), p) for name, p in named if p not in ignored.parameters), mesh)


def managed_params_of(
    root: nn.Module, ignored: Ignored, left_to_ancestor: frozenset[nn.Parameter]
) -> list[ManagedParam]:
    """The parameters a unit around `root` takes over, in `named_modules` order.

    Raises:
        ValueError: one has no dimensions or holds integers; or a unit elsewhere has taken it over already.
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
            ParamInfo(name, tuple(locations[original]), form_of(original)),
            local_parameter(original),
            original,
        )
        for original, name in names.items()
    ]
    for one in managed:
        if not one.parameter.shape:  # asked of a lazy module's, it raises what torch raises
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {one.info.name} to a 1D tensor with numel equal to 1."
            )
        if not one.parameter.is_floating_point():
            error = ValueError("Cannot flatten integer dtype tensors")
            error.add_note(
                f"{one.info.name} has {one.parameter.dtype}; pass it in ignored_states, or shard it by fully_shard"
            )
            raise error
    return managed


def parallel_groups_of(managed: Iterable[ManagedParam]) -> tuple[ProcessGroup, ...]:
    """Those among which tensor parallelism has spread some of the parameters, each once."""
    forms = [one.info.parallel for one in managed if one.info.parallel is not None]
    groups = (group for form in forms for group in form.mesh.get_all_groups())
    return tuple(group for group in dict.fromkeys(groups) if group.size() > 1)


def mark_managed(root: nn.Module, ignored: Ignored, managed: Iterable[ManagedParam]) -> None:
    """Say so of the parameters, and of the modules, by names that transformers and Dynamo ask for."""
    for one in managed:
        setattr(one.parameter, MANAGED, one.info)
        setattr(one.original, MANAGED, one.info)
    mark_modules(module for module in root.modules() if module not in ignored.modules)


def mark_modules(modules: Iterable[nn.Module]) -> None:
    """As managed, by names that Dynamo asks for."""
    for module in modules:
        # By the second Dynamo asks whether it may trace the module, which here does not depend on that argument.
        # Not by setattr, in which a module looks among its parameters: each is marked by every unit around it.
        vars(module).update({_MANAGED_MODULE: True, _USES_ORIG_PARAMS: True})


def _check_location(parameter: nn.Parameter, name: str, location: ParamLocation) -> None:
    """The modules of the unit that has it may keep a parameter; anywhere else it would go unheard of and untrained."""
    managed: ParamInfo = getattr(parameter, MANAGED)
    if location not in managed.locations:
        raise ValueError(
            f"{name} is the same parameter as {managed.name}, which another FullyShardedDataParallel has sharded "
            "already; wrap one module that contains both, or let auto_wrap_policy choose what to wrap"
        )

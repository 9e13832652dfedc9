"""Base class of FullyShardedDataParallel's mixins, and the root of nested wrappers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._engine.root import Root
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.managed import Ignored, clean_name
from impl.distributed.fsdp._params.nested import Inputs, cast_inputs, move_inputs
from impl.distributed.fsdp.api import MixedPrecision, ShardingStrategy

_FLAT_PARAM = "_flat_param"


class Wrapper(nn.Module):
    """Attributes that the constructor of FullyShardedDataParallel sets."""

    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    compute_device: torch.device
    limit_all_gathers: bool
    _use_orig_params: bool
    _use_full_prec_in_eval: bool
    _device_mesh: DeviceMesh | None
    _fsdp_wrapped_module: nn.Module
    _unit: Unit[FlatParamGroup]
    _groups: Groups
    _ignored: Ignored
    _root: Root | None
    _buffer_dtypes: dict[str, torch.dtype]  # dtypes before wrapping

    def _find_root(self) -> Root:
        raise NotImplementedError

    def _named_handles(self) -> list[tuple[str, FlatParamGroup]]:
        """Return the flat parameters with their names in modules."""
        handles = self._unit.param_groups
        return [
            (f"{_FLAT_PARAM}_{index}" if index else _FLAT_PARAM, handle)
            for index, handle in enumerate(handles)
        ]

    def _inputs_of_root(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        """Return the inputs on the compute device, cast if the mixed precision of the root requests it."""
        args, kwargs = move_inputs(args, kwargs, self.compute_device)
        precision = self.mixed_precision
        casts = precision.cast_root_forward_inputs and not self._unit.is_in_full_precision()
        return cast_inputs(args, kwargs, precision.param_dtype if casts else None)

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        """Mesh that DTensors are sharded over."""
        return self._device_mesh or DeviceMesh.from_group(self.process_group, self.compute_device.type)


def root_over(wrappers: Sequence[Wrapper], device: torch.device) -> Root:
    """Create the root of nested wrappers, of which the outermost comes first. Check their settings and devices.

    Raises:
        ValueError: the wrappers differ in a setting that applies to the whole root.
        RuntimeError: parameters are not on the compute device.
    """
    check_alike(wrappers)
    for wrapper in wrappers:
        for group in wrapper._unit.param_groups:
            group.check_device(wrapper.compute_device)
    outermost = wrappers[0]
    names = {module: clean_name(f"{name}.").rstrip(".") for name, module in outermost.named_modules()}
    for wrapper in wrappers:
        wrapper._unit.name = names[wrapper] or type(wrapper.module).__name__
    units = [wrapper._unit for wrapper in wrappers]
    return Root(outermost._unit, units, device, outermost.limit_all_gathers)


def check_alike(wrappers: Sequence[Wrapper]) -> None:
    """Check that wrappers of one root have the same settings.

    Raises:
        ValueError: a setting that applies to the whole root differs between two wrappers.
    """
    for name in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        values = {getattr(wrapper, name) for wrapper in wrappers}
        if len(values) != 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")

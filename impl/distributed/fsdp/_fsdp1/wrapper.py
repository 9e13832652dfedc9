"""What FullyShardedDataParallel has for those that it is made of, and the root of those that lie inside one another."""

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
from impl.distributed.fsdp.api import MixedPrecision, ShardingStrategy

_FLAT_PARAM = "_flat_param"


class Wrapper(nn.Module):
    """Its constructor sets these."""

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
    _buffer_dtypes: dict[str, torch.dtype]  # as they were wrapped

    def _find_root(self) -> Root:
        raise NotImplementedError

    def _named_handles(self) -> list[tuple[str, FlatParamGroup]]:
        """Under the names by which modules know the flat parameters."""
        handles = self._unit.param_groups
        return [
            (f"{_FLAT_PARAM}_{index}" if index else _FLAT_PARAM, handle)
            for index, handle in enumerate(handles)
        ]

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        """What DTensors are sharded over."""
        return self._device_mesh or DeviceMesh.from_group(self.process_group, self.compute_device.type)


def root_over(wrappers: Sequence[Wrapper], device: torch.device) -> Root:
    """The root of wrappers that lie inside one another, the outermost first; each has to fit its root, and its device.

    Raises:
        ValueError: they differ in what a root can have in one way alone.
        RuntimeError: the parameters of one are not where it computes.
    """
    check_alike(wrappers)
    for one in wrappers:
        for group in one._unit.param_groups:
            group.check_device(one.compute_device)
    outermost = wrappers[0]
    names = {one: clean_name(f"{name}.").rstrip(".") for name, one in outermost.named_modules()}
    for one in wrappers:
        one._unit.name = names[one] or type(one.module).__name__
    units = [one._unit for one in wrappers]
    return Root(outermost._unit, units, device, outermost.limit_all_gathers)


def check_alike(wrappers: Sequence[Wrapper]) -> None:
    """
    Raises:
        ValueError: something that one root can have in one way alone is different in two of its wrappers.
    """
    for name in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        values = {getattr(one, name) for one in wrappers}
        if len(values) != 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")

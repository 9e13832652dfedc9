"""Dtypes of each parameter of a sharded model."""

from __future__ import annotations

from torch import nn

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._fully_shard.module_state import state_of
from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._params.param_group import ParamGroup
from impl.distributed.fsdp._params.policies import ParamPrecision
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel


def param_precisions(module: nn.Module) -> dict[str, ParamPrecision]:
    """Return the dtypes to compute, reduce and step in, by the parameters' names before `module` was sharded.

    Parameters that are not sharded have no dtype to reduce in. A shared parameter has an entry for each module.

    Sync: none. Collectives: none.
    Source: torch has no such function.

    >>> param_precisions(nn.Linear(2, 1, bias=False))["weight"].master_dtype
    torch.float32
    """
    prefixes = {submodule: f"{prefix}." if prefix else "" for prefix, submodule in module.named_modules()}
    precisions: dict[str, ParamPrecision] = {}
    for submodule in prefixes:
        for group in _param_groups_of(submodule):
            for index, info in enumerate(group.param_infos):
                for place in info.locations:
                    if place.module in prefixes:
                        name = clean_name(prefixes[place.module] + place.attribute)
                        precisions[name] = group.precision_of(index)
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, FlatParameter):
            precisions.setdefault(clean_name(name), ParamPrecision(parameter.dtype, None, parameter.dtype))
    return precisions


def _param_groups_of(module: nn.Module) -> list[ParamGroup]:
    if isinstance(module, FullyShardedDataParallel):
        return [*module._unit.param_groups]
    state = state_of(module)
    return [] if state is None else [*state.param_groups]

"""What dtypes each parameter of a sharded model really has."""

from __future__ import annotations

from torch import nn

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._fully_shard.module_state import state_of
from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._params.param_group import ParamGroup
from impl.distributed.fsdp._params.policies import ParamPrecision
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel


def param_precisions(module: nn.Module) -> dict[str, ParamPrecision]:
    """By the names that the parameters of `module` had before it was sharded: to compute, to reduce and to step in.

    Those that are not sharded have nothing to reduce in. A parameter that modules share has a row for each.

    Sync: none. Collectives: none.
    Source: torch has no such thing.

    >>> param_precisions(nn.Linear(2, 1, bias=False))["weight"].master_dtype
    torch.float32
    """
    prefixes = {one: f"{prefix}." if prefix else "" for prefix, one in module.named_modules()}
    found: dict[str, ParamPrecision] = {}
    for one in prefixes:
        for group in _groups_of(one):
            for index, info in enumerate(group.param_infos):
                for place in info.locations:
                    if place.module in prefixes:
                        name = clean_name(prefixes[place.module] + place.attribute)
                        found[name] = group.precision_of(index)
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, FlatParameter):
            found.setdefault(clean_name(name), ParamPrecision(parameter.dtype, None, parameter.dtype))
    return found


def _groups_of(module: nn.Module) -> list[ParamGroup]:
    if isinstance(module, FullyShardedDataParallel):
        return [*module._unit.param_groups]
    state = state_of(module)
    return [] if state is None else [*state.groups]

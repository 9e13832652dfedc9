"""Settings of the groups of a module that fully_shard has sharded, and the checks before anything is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from impl.distributed.fsdp._layout.per_param import DTensorGroup


def check_same_mesh(call: str, comm_name: str, groups: Sequence[DTensorGroup]) -> None:
    """Raise if the groups have different meshes. Groups that only differ in dtypes can share communication."""
    if len({(group.process_groups.shard, group.process_groups.replicate) for group in groups}) > 1:
        raise ValueError(
            f"{call} is not supported with multiple param groups (from per-param mesh via shard_placement_fn). "
            f"The {comm_name} would be ambiguous across groups with different meshes."
        )


def check_all_sharded(call: str, module: nn.Module, groups: Sequence[DTensorGroup]) -> None:
    copied = [param for group in groups for param in group.params if not param.is_sharded]
    if copied:
        paths = {child: f"{name}." if name else "" for name, child in module.named_modules()}
        places = [param.info.locations[0] for param in copied]
        names = ", ".join(paths.get(place.module, "") + place.attribute for place in places)
        raise AssertionError(
            f"{call} reached {names}, for which dp_mesh_dims has no dimension to shard over, so they "
            "are neither gathered nor freed; call it on the sharded modules, with recurse=False"
        )


def check_no_custom_comm(call: str, groups: Sequence[DTensorGroup]) -> None:
    for group in groups:
        for comm_name, comm in (
            ("all gather", group.options.custom_all_gather),
            ("reduce scatter", group.reduction.custom_reduce_scatter),
        ):
            if comm is not None:
                raise AssertionError(
                    f"cannot call {call} when {comm_name} comm is custom: {type(comm).__name__}"
                )


def check_bool(reshard_after_forward: object) -> None:
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")


def check_max_input_buffers(max_input_buffers: object) -> None:
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")


def use_separate_scatter_groups(module: nn.Module, groups: Sequence[DTensorGroup], enable: bool) -> None:
    """Give groups their own process group for reduce-scatters, or the shared one if not `enable`.

    Collectives: creates one process group for all groups that shard over the same ranks.
    """
    check_all_sharded("set_separate_reduce_scatter_group()", module, groups)
    scatter_groups: dict[tuple[int, ...], Any] = {}
    for group in groups:
        shard, reduction = group.process_groups.shard, group.reduction
        if not enable or shard is None:
            reduction.scatter_group = None
            continue
        ranks = tuple(dist.get_process_group_ranks(shard))
        if ranks not in scatter_groups:
            scatter_groups[ranks] = reduction.scatter_group or dist.new_group(
                list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
            )
        reduction.scatter_group = scatter_groups[ranks]

"""What is set of the groups of a module that fully_shard has sharded, and what is refused before anything is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from impl.distributed.fsdp._layout.per_param import DTensorGroup


def refuse_meshes(call: str, what: str, groups: Sequence[DTensorGroup]) -> None:
    """Groups for the sake of dtypes alone take the same communication."""
    if len({(group.groups.shard, group.groups.replicate) for group in groups}) > 1:
        raise ValueError(
            f"{call} is not supported with multiple param groups (from per-param mesh via shard_placement_fn). "
            f"The {what} would be ambiguous across groups with different meshes."
        )


def refuse_copies(call: str, module: nn.Module, groups: Sequence[DTensorGroup]) -> None:
    copied = [param for group in groups for param in group.params if not param.is_sharded]
    if copied:
        paths = {one: f"{name}." if name else "" for name, one in module.named_modules()}
        places = [param.info.locations[0] for param in copied]
        names = ", ".join(paths.get(one.module, "") + one.attribute for one in places)
        raise AssertionError(
            f"{call} reached {names}, for which dp_mesh_dims has no dimension to shard over, so that nothing of them "
            "is gathered or freed; call it on the modules that are sharded, with recurse=False"
        )


def refuse_own(call: str, groups: Sequence[DTensorGroup]) -> None:
    for group in groups:
        for what, comm in (
            ("all gather", group.options.all_gather),
            ("reduce scatter", group.reduction.comm),
        ):
            if comm is not None:
                raise AssertionError(f"cannot call {call} when {what} comm is custom: {type(comm).__name__}")


def refuse_others_than_bools(reshard_after_forward: Any) -> None:
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")


def refuse_buffers(max_input_buffers: Any) -> None:
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")


def scatter_apart(module: nn.Module, groups: Sequence[DTensorGroup], enable: bool) -> None:
    """Collectives: makes a process group for those that shard over the same ranks."""
    refuse_copies("set_separate_reduce_scatter_group()", module, groups)
    made: dict[tuple[int, ...], Any] = {}
    for group in groups:
        shard, reduction = group.groups.shard, group.reduction
        if not enable or shard is None:
            reduction.scatters_over = None
            continue
        ranks = tuple(dist.get_process_group_ranks(shard))
        if ranks not in made:
            made[ranks] = reduction.scatters_over or dist.new_group(
                list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
            )
        reduction.scatters_over = made[ranks]

"""Lists of DTensors, whose updates read and write the local tensors only.

Updates of Adam, AdamW, SGD and Adagrad treat each element alone. So the update of local tensors is that of the
DTensors, to the bit, if all tensors of a parameter have its mesh and placements. It also works where torch raises:
for parameters over several meshes, or for DTensors beside plain tensors.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from impl.kernels import PLAIN_TYPES, RULES
from impl.optim._list_cache import GroupLists, list_names
from impl.optim._mesh_placements import meshes_and_placements
from impl.optim._shards import is_distributed, local_parts


def has_local_update(optimizer: Optimizer, group_lists: GroupLists) -> bool:
    """Return whether `local_lists` can update the group's DTensors, as long as its lists stay the same."""
    rule = next((rule for rule in RULES if type(optimizer) in rule.OPTIMIZERS), None)
    params, group = group_lists.params, group_lists.group
    if rule is None or group["differentiable"] or not any(map(is_distributed, params)):
        return False
    lists = dict(zip(list_names(type(optimizer)), group_lists.lists, strict=True))
    states = [[state for state in lists[name] if state is not None] for name in rule.STATES]
    counters = lists.get("state_steps", [])
    numbers = {name: value for name, value in group.items() if name != "params"}
    return (
        all(meshes_and_placements(params) == meshes_and_placements(tensors) for tensors in states if tensors)
        # torch refuses a DTensor as learning rate or counter of local tensors.
        and not any(map(is_distributed, [*counters, *tree_leaves(numbers)]))
        and PLAIN_TYPES.issuperset(map(type, local_parts([*params, *chain.from_iterable(states)])))
    )


def local_lists(group_lists: GroupLists) -> list[list[Any]] | None:
    """Return the local tensors of this step's lists, or None if a gradient is not sharded like its parameter."""
    if meshes_and_placements(group_lists.params) != meshes_and_placements(group_lists.grads):
        return None
    lists = [local_parts(tensors) for tensors in group_lists.lists]
    # A local gradient may be the result of a collective that has not ended.
    return lists if PLAIN_TYPES.issuperset(map(type, lists[1])) else None

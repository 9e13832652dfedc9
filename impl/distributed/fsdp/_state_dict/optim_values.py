"""Values in the state that an optimizer has for a parameter, and their descriptions for other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from impl.distributed.fsdp._state_dict.optim_keys import StateDict


@dataclass(frozen=True)
class TensorMeta:
    """A tensor of one dimension or more, without its elements."""

    shape: torch.Size
    dtype: torch.dtype


def describe_state_value(value: object) -> Any:
    """Return a value of a state as other ranks need it: the value itself, or shape and dtype of a tensor."""
    if not isinstance(value, Tensor):
        return value
    return TensorMeta(value.shape, value.dtype) if value.dim() else value.detach().cpu()


def describe_state(state: StateDict) -> StateDict:
    return {name: describe_state_value(state[name]) for name in sorted(state)}


def offload(state: StateDict) -> StateDict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def own_copy(value: object) -> Any:
    """Return a copy of a number or of a container of numbers, because optimizers change them in place."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def hides_tensors(value: object) -> bool:
    """Return whether a value is a container of tensors other than numbers, which may or may not be sharded."""
    if isinstance(value, (Tensor, TensorMeta)):
        return False
    leaves = tree_leaves(value)
    return any(
        isinstance(leaf, TensorMeta) or (isinstance(leaf, Tensor) and leaf.dim() > 0) for leaf in leaves
    )

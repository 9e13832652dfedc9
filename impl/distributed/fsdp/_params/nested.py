"""Tensors inside a module's inputs and outputs: in nested containers and in user objects."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from impl.distributed.fsdp._params.tensor_parallel import local_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # inputs of a module, by position and by keyword


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (tuple, list, set)):
        for entry in value:
            yield from tensors_in(entry)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


@dataclass(frozen=True)
class ObjectTensor:
    """Tensor that a user object holds, in its attributes or nested in them."""

    tensor: Tensor
    holder: Any  # list or dictionary with the tensor, None if immutable
    key: Any


def tensors_in_objects(value: object) -> list[ObjectTensor]:
    """Return the tensors that user objects in `value` hold, at any depth. Reference cycles are allowed."""
    tensors: list[ObjectTensor] = []
    pending: list[tuple[Any, bool]] = [(value, False)]  # value, and whether a user object holds it
    visited: set[int] = set()
    while pending:
        item, is_inside = pending.pop()
        if isinstance(item, (Tensor, type, nn.Module, ModuleType)) or id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, dict):
            holder, places = item, item.items()
        elif isinstance(item, (list, tuple, set)):
            holder, places = (item if isinstance(item, list) else None), enumerate(item)
        else:
            holder: Any = getattr(item, "__dict__", {})
            places, is_inside = holder.items(), is_inside or not _is_dataclass(item)
        for key, content in places:
            if isinstance(content, Tensor) and is_inside:
                tensors.append(ObjectTensor(content, holder, key))
            else:
                pending.append((content, is_inside))
    return tensors


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value` with `change` applied to each tensor, or `value` itself if no tensor changed.

    Lists, tuples, named ones too, sets, dicts and dataclasses keep their type. A packed sequence keeps its lengths.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data = change(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, dict):
        return _like_dict(value, {key: map_tensors(entry, change) for key, entry in value.items()})
    if isinstance(value, (tuple, list, set)):
        changed = [map_tensors(entry, change) for entry in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = {name: map_tensors(getattr(value, name), change) for name in names}
        if all(changes[name] is getattr(value, name) for name in names):
            return value
        return dataclasses.replace(value, **changes)
    return value


def cast_floats(value: object, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in `value` to `dtype`, differentiably."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)


def cast_inputs(args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype | None) -> Inputs:
    return (args, kwargs) if dtype is None else (cast_floats(args, dtype), cast_floats(kwargs, dtype))


def move_inputs(args: tuple[object, ...], kwargs: dict[str, object], device: torch.device) -> Inputs:
    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return map_tensors(args, moved), map_tensors(kwargs, moved)


def alias_leaves(args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
    """Return the inputs with a view of each leaf that needs a gradient, whose hooks run after the module's backward.

    autograd runs the hooks of a leaf before other nodes that are ready.
    """

    def alias(tensor: Tensor) -> Tensor:
        has_view = tensor.is_leaf and tensor.requires_grad and tensor.layout is torch.strided
        return tensor.view_as(tensor) if has_view else tensor

    return map_tensors(args, alias), map_tensors(kwargs, alias)


def clone_aliases(memory: set[int], value: object) -> Any:
    """Replace the tensors in `value` whose storage is in `memory` by differentiable copies."""
    return map_tensors(value, functools.partial(_clone_if_alias, memory))


def clone_aliases_in_objects(memory: set[int], held: Sequence[ObjectTensor]) -> list[Tensor]:
    """Replace the tensors in user objects that alias `memory` by copies.

    Return the tensors that the objects hold now.
    """
    tensors = [_clone_if_alias(memory, entry.tensor) for entry in held]
    for entry, tensor in zip(held, tensors, strict=True):
        if tensor is not entry.tensor and entry.holder is not None:
            entry.holder[entry.key] = tensor
    return tensors


def _clone_if_alias(memory: set[int], tensor: Tensor) -> Tensor:
    # Sparse tensors, and tensors inside functorch's transforms, have no storage.
    local = local_of(tensor)
    is_alias = torch._C._has_storage(local) and local.untyped_storage()._cdata in memory
    return tensor.clone() if is_alias else tensor


def _like_dict(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    if all(new[key] is entry for key, entry in old.items()):
        return old
    if isinstance(old, OrderedDict):
        copy = type(old)()
        for key, entry in new.items():
            copy[key] = entry
        return copy
    return new


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)

"""Tensors inside what a module is given and returns: in containers, nested as deep as one likes, and in objects."""

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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Each tensor, where it stands; what is no container and no tensor holds none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list, set)):
        for each in value:
            yield from tensors_in(each)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that an object has, in its attributes or in what stands there."""

    tensor: Tensor
    holder: Any  # where another can be put under the key, or None
    key: Any


def held_in(value: Any) -> list[HeldTensor]:
    """What the objects in `value` have that are neither containers nor tensors, at any depth and in circles too."""
    found: list[HeldTensor] = []
    waiting: list[tuple[Any, bool]] = [(value, False)]  # and whether it stands in an object
    seen: set[int] = set()
    while waiting:
        each, is_inside = waiting.pop()
        if isinstance(each, (Tensor, type, nn.Module, ModuleType)) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            holder, places = each, each.items()
        elif isinstance(each, (list, tuple, set)):
            holder, places = (each if isinstance(each, list) else None), enumerate(each)
        else:
            holder: Any = getattr(each, "__dict__", {})
            places, is_inside = holder.items(), is_inside or not _is_dataclass(each)
        for key, part in places:
            if isinstance(part, Tensor) and is_inside:
                found.append(HeldTensor(part, holder, key))
            else:
                waiting.append((part, is_inside))
    return found


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The like of `value` with each tensor changed; `value` itself where no tensor was.

    Lists, tuples, named ones too, sets, dicts and dataclasses keep their type. A packed sequence keeps its lengths.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data = change(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, dict):
        return _like_dict(value, {key: replaced(each, change) for key, each in value.items()})
    if isinstance(value, (tuple, list, set)):
        parts = [replaced(each, change) for each in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = {name: replaced(getattr(value, name), change) for name in names}
        if all(changes[name] is getattr(value, name) for name in names):
            return value
        return dataclasses.replace(value, **changes)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `value` in another dtype, differentiably; the rest as it is."""
    return replaced(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)


def apart_from(memory: set[int], value: Any) -> Any:
    """`value` with differentiable copies of the tensors that lie in storages with these addresses."""
    return replaced(value, functools.partial(_apart, memory))


def set_apart(memory: set[int], held: Sequence[HeldTensor]) -> list[Tensor]:
    """Have objects hold such copies; what they hold then."""
    tensors = [_apart(memory, one.tensor) for one in held]
    for one, tensor in zip(held, tensors, strict=True):
        if tensor is not one.tensor and one.holder is not None:
            one.holder[one.key] = tensor
    return tensors


def _apart(memory: set[int], tensor: Tensor) -> Tensor:
    # Sparse ones and those inside of functorch's transforms have no storage.
    local = local_of(tensor)
    lies_in = torch._C._has_storage(local) and local.untyped_storage()._cdata in memory
    return tensor.clone() if lies_in else tensor


def _like_dict(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    if all(new[key] is each for key, each in old.items()):
        return old
    if isinstance(old, OrderedDict):
        made = type(old)()
        for key, each in new.items():
            made[key] = each
        return made
    return new


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)

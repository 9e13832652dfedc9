"""Tensors inside what a module is given and returns: in containers, nested as deep as one likes, and in objects."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


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


def attributes_in(value: Any) -> Iterator[dict[str, Any]]:
    """Of each object that is neither container nor tensor, and of those in attributes, each once."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (Tensor, PackedSequence, type, nn.Module, ModuleType)) or id(each) in seen:
            continue
        if isinstance(each, dict):
            parts = each.values()
        elif isinstance(each, (tuple, list, set)):
            parts = each
        else:
            parts = (attributes := getattr(each, "__dict__", {})).values()
            if attributes and not _is_dataclass(each):
                yield attributes
        if parts:
            seen.add(id(each))
            waiting.extend(parts)


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


def set_apart(memory: set[int], objects: Sequence[dict[str, Any]]) -> None:
    """Put such copies in the attributes of objects."""
    for attributes in objects:
        apart = {name: apart_from(memory, each) for name, each in attributes.items()}
        attributes.update({name: each for name, each in apart.items() if each is not attributes[name]})


def _apart(memory: set[int], tensor: Tensor) -> Tensor:
    # Sparse ones and those inside of functorch's transforms have no storage.
    lies_in = torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in memory
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

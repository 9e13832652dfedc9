"""A copy of torch: a subject that behaves like the reference and shares no public object with it.

    python -m pytest conformance --subject conformance.mirror

It must pass, because the suite compares behaviour and not the identity of objects.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from typing import Any

import torch

from conformance.judge import surface

# Python creates these attributes for each class.
_OF_THE_CLASS = ("__dict__", "__weakref__", "__module__")
# Dynamo traces a region as a decorator only if its class derives from torch's.
_DERIVED = (torch.amp.autocast,)
# These classes are not copied, because fully_shard changes the classes of modules and recognises them by these.
_SHARED = "distributed.fsdp"
# FSDP1 is left out, because it would not be copied either and `--subject torch` already judges it against itself.
_PUBLIC = {
    path: surface.resolve(path)
    for path in surface.names()
    if path != "distributed.fsdp.FullyShardedDataParallel"
}


@functools.cache
def _renewed(value: Any) -> Any:
    """Return a copy of `value`, the same for each of its public names. Copied classes derive from copied classes."""
    if inspect.isfunction(value):
        return _copied_function(value, value, value)
    if issubclass(value, enum.Enum):
        return enum.Enum(value.__name__, {member.name: member.value for member in value})
    bases = tuple(_renewed(base) if base in _PUBLIC.values() else base for base in value.__bases__)
    mirrored = types.new_class(value.__name__, (value,) if value in _DERIVED else bases)
    for name, attribute in vars(value).items():
        if name not in _OF_THE_CLASS:
            setattr(mirrored, name, _copied(attribute, value, mirrored))
    return mirrored


def _copied(attribute: Any, old: type, new: type) -> Any:
    if inspect.isfunction(attribute):
        return _copied_function(attribute, old, new)
    if isinstance(attribute, (staticmethod, classmethod)):
        return type(attribute)(_copied(attribute.__func__, old, new))
    return attribute


def _copied_function(function: Any, old: Any, new: Any) -> Any:
    """Return a copy of `function`. In its closure, and in those of its decorators, `new` replaces the class `old`."""
    cells = [types.CellType(_in_closure(cell.cell_contents, old, new)) for cell in function.__closure__ or ()]
    mirrored = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    mirrored.__kwdefaults__, mirrored.__qualname__ = function.__kwdefaults__, function.__qualname__
    mirrored.__annotations__, mirrored.__doc__ = function.__annotations__, function.__doc__
    mirrored.__module__ = function.__module__
    vars(mirrored).update(vars(function))
    return mirrored


def _in_closure(content: Any, old: Any, new: Any) -> Any:
    return new if content is old else _copied(content, old, new)


def _place(path: str) -> types.ModuleType:
    """Return the module of this package at torch's path `path`, and create it at the first call."""
    if not path:
        return sys.modules[__name__]
    name = f"{__name__}.{path}"
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        parent, _, last = path.rpartition(".")
        setattr(_place(parent), last, sys.modules[name])
    return sys.modules[name]


for _path, _value in _PUBLIC.items():
    _parent, _, _name = _path.rpartition(".")
    _made, _module = _value if _parent == _SHARED else _renewed(_value), _place(_parent)
    if _made is not _value:
        _made.__module__ = _module.__name__
    setattr(_module, _name, _made)

"""torch behind new objects: a subject that behaves as the reference does and shares no public object with it.

    python -m pytest conformance --subject conformance.mirror

It must be judged green: the suite compares what is done, not who does it.
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

# What Python makes anew for each class.
_OF_THE_CLASS = ("__dict__", "__weakref__", "__module__")
# Dynamo traces a region as a decorator only if its class derives from torch's.
_DERIVED = (torch.amp.autocast,)
# Of fully_shard, which changes the classes of modules and tells them by these.
_SHARED = "distributed.fsdp"
# FSDP1, which would stand here as it is, is judged against itself by `--subject torch`.
_PUBLIC = {
    path: surface.resolve(path)
    for path in surface.names()
    if path != "distributed.fsdp.FullyShardedDataParallel"
}


@functools.cache
def _renewed(value: Any) -> Any:
    """A new object that does the same; one and the same for each public name that spells it, or derives from it."""
    if inspect.isfunction(value):
        return _copied_function(value, value, value)
    if issubclass(value, enum.Enum):
        return enum.Enum(value.__name__, {member.name: member.value for member in value})
    bases = tuple(_renewed(base) if base in _PUBLIC.values() else base for base in value.__bases__)
    made = types.new_class(value.__name__, (value,) if value in _DERIVED else bases)
    for name, attribute in vars(value).items():
        if name not in _OF_THE_CLASS:
            setattr(made, name, _copied(attribute, value, made))
    return made


def _copied(attribute: Any, old: type, new: type) -> Any:
    if inspect.isfunction(attribute):
        return _copied_function(attribute, old, new)
    if isinstance(attribute, (staticmethod, classmethod)):
        return type(attribute)(_copied(attribute.__func__, old, new))
    return attribute


def _copied_function(function: Any, old: Any, new: Any) -> Any:
    """The same code; where it, or a decorator of it, has the class `old` in its closure, it has `new`."""
    cells = [types.CellType(_in_closure(cell.cell_contents, old, new)) for cell in function.__closure__ or ()]
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    made.__module__ = function.__module__
    vars(made).update(vars(function))
    return made


def _in_closure(content: Any, old: Any, new: Any) -> Any:
    return new if content is old else _copied(content, old, new)


def _place(path: str) -> types.ModuleType:
    """The module of this package at torch's path `path`, made when it is first asked for."""
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

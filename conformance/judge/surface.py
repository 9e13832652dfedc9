"""torch's public surface in the areas that are judged, read by introspection: names, methods and parameters.

An item is written as `amp.GradScaler` (a name), `amp.GradScaler.step` (a method) or
`amp.GradScaler.step(optimizer)` (a parameter; `amp.GradScaler(init_scale)` for a constructor's).
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from types import ModuleType
from typing import Any

import torch

# Modules whose public names are covered. If a name is in several of them, the first counts.
MODULES = (
    "amp",
    "amp.grad_scaler",
    "amp.autocast_mode",
    "cuda.amp",
    "cpu.amp",
    "nn.utils.clip_grad",
    "distributed.fsdp.wrap",
    "distributed.fsdp.sharded_grad_scaler",
    "distributed.fsdp._fully_shard",  # public in its package
)
# Public names that no `__all__` lists, or of modules that are not covered completely.
ADDED = (
    "nn.utils.get_total_norm",
    "nn.utils.clip_grads_with_norm_",
    "distributed.fsdp.FullyShardedDataParallel",
    "dynamo.OptimizerVariable",
)
# Private places in torch of names that are public in the surface.
PRIVATE_IN_TORCH = {"dynamo.OptimizerVariable": "_dynamo.variables.optimizer.OptimizerVariable"}
# Classes that only Dynamo calls. They are judged by the behaviour of a compiled step; their methods are not covered.
CALLED_BY_TORCH = ("dynamo.OptimizerVariable",)
LEFT_OUT = {
    "cuda.amp.amp_definitely_not_available": "asks whether this torch was built with CUDA; not part of AMP's behaviour"
}
_BOUND = re.compile(r"(>=|<)(\d+)\.(\d+)")  # a bound of a range of torch versions
_DUNDER_METHODS = ("__call__", "__enter__", "__exit__", "__getstate__", "__setstate__")


@dataclass(frozen=True)
class SurfaceItem:
    path: str  # path of the name, such as `amp.GradScaler`
    method: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        name = f"{self.path}.{self.method}" if self.method and self.method != "__init__" else self.path
        return f"{name}({self.parameter})" if self.parameter else name


def torch_version() -> str:
    """Return the version of the installed torch, such as `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def torch_bounds(torch_range: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the bounds of a range of torch versions, such as `>=2.12,<2.14`. An empty text is every version.

    Raises:
        ValueError: a bound is not `>=MAJOR.MINOR` or `<MAJOR.MINOR`.
    """
    bounds = [(text, _BOUND.fullmatch(text)) for text in torch_range.split(",") if torch_range]
    if wrong := [text for text, match in bounds if match is None]:
        raise ValueError(
            f"torch = {torch_range!r} has the bound {wrong[0]!r}; expected >=MAJOR.MINOR or <MAJOR.MINOR, "
            "with a comma between two"
        )
    return [(match[1], (int(match[2]), int(match[3]))) for _, match in bounds if match is not None]


def is_torch_in(torch_range: str, version: str = "") -> bool:
    """Return whether a version of torch, the installed one by default, is in a range such as `>=2.12,<2.14`."""
    major, minor = map(int, (version or torch.__version__).split(".")[:2])
    return all(
        (major, minor) < bound if side == "<" else (major, minor) >= bound
        for side, bound in torch_bounds(torch_range)
    )


def resolve(path: str) -> Any:
    """Return torch's object at a path below `torch`."""
    module, name = _place(path)
    return getattr(importlib.import_module(module), name)


def is_imported(path: str) -> bool:
    """Return whether the torch module of a name is imported. torch imports Dynamo, which takes a second, on demand."""
    return _place(path)[0] in sys.modules


def is_defined_in_its_module(path: str) -> bool:
    """Return whether torch's class at a path is the original.

    A replacement may copy the original's module and name, but then it derives from a class with the same name.
    """
    value = resolve(path)
    bases = {(base.__module__, base.__qualname__) for base in value.__mro__[1:]}
    return value.__module__ == _place(path)[0] and (value.__module__, value.__qualname__) not in bases


def _place(path: str) -> tuple[str, str]:
    """Return the torch module of a name, and its name there."""
    module, _, name = f"torch.{PRIVATE_IN_TORCH.get(path, path)}".rpartition(".")
    return module, name


@functools.cache
def names() -> tuple[str, ...]:
    """Return the path below `torch` of every public name, once."""
    values: dict[str, Any] = {}
    for module_path in MODULES:
        module = importlib.import_module(f"torch.{module_path}")
        public = getattr(module, "__all__", None) or _defined_in(module)
        for name in sorted(public):
            value = getattr(module, name)
            path = _shortest(module_path, name)
            if (
                not inspect.ismodule(value)
                and path not in LEFT_OUT
                and all(value is not known for known in values.values())
            ):
                values[path] = value
    return (*values, *ADDED)


@functools.cache
def argument_types() -> tuple[str, ...]:
    """Return the enums and configurations for arguments of FSDP, which are not judged by themselves."""
    package = importlib.import_module("torch.distributed.fsdp")
    values = {f"distributed.fsdp.{name}": getattr(package, name) for name in package.__all__}
    return tuple(path for path, value in values.items() if path not in names() and _is_plain(value))


def _is_plain(value: Any) -> bool:
    return inspect.isclass(value) and (issubclass(value, enum.Enum) or is_dataclass(value))


def _defined_in(module: ModuleType) -> list[str]:
    """Return the names without an underscore that the module does not import from elsewhere."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(module.__name__)
    ]


def _shortest(module_path: str, name: str) -> str:
    """Return the path of a name in the module's package if torch has it there, else its path in the module."""
    package = module_path.rpartition(".")[0]
    offered = bool(package) and getattr(importlib.import_module(f"torch.{package}"), name, None)
    own = getattr(importlib.import_module(f"torch.{module_path}"), name)
    return f"{package}.{name}" if offered is own else f"{module_path}.{name}"


@functools.cache
def items() -> tuple[SurfaceItem, ...]:
    return tuple(item for path in names() for item in _items_of(path, resolve(path)))


def owner(item: str) -> str:
    """Return the public name that an item is, or is a method or parameter of. An unknown item is its own name."""
    path = item.partition("(")[0]
    return next((name for name in (path, path.rpartition(".")[0]) if name in names()), path)


def _items_of(path: str, value: Any) -> Iterator[SurfaceItem]:
    yield SurfaceItem(path)
    if path in CALLED_BY_TORCH:
        return
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            return
        for method, attribute in vars(value).items():
            is_static = isinstance(attribute, staticmethod)
            function = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
            if inspect.isfunction(function) and (
                method in ("__init__", *_DUNDER_METHODS) or not method.startswith("_")
            ):
                if method != "__init__":
                    yield SurfaceItem(path, method)
                arguments = parameters(function)[0 if is_static else 1 :]
                yield from (SurfaceItem(path, method, name) for name in arguments)
    else:
        yield from (SurfaceItem(path, "", name) for name in parameters(value))


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)

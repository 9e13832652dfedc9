"""torch's public surface in the areas judged here, read by introspection: names, methods and parameters.

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

# Modules whose public names are covered; where a name has several spellings the first one counts.
MODULES = (
    "amp",
    "amp.grad_scaler",
    "amp.autocast_mode",
    "cuda.amp",
    "cpu.amp",
    "nn.utils.clip_grad",
    "distributed.fsdp.wrap",
    "distributed.fsdp.sharded_grad_scaler",
    "distributed.fsdp._fully_shard",  # its names are public a folder above
)
# Public by a spelling that no `__all__` lists, or in a module of which not all is ours.
ADDED = (
    "nn.utils.get_total_norm",
    "nn.utils.clip_grads_with_norm_",
    "distributed.fsdp.FullyShardedDataParallel",
    "dynamo.OptimizerVariable",
)
# Where torch has what other packages may have in public.
PRIVATE_IN_TORCH = {"dynamo.OptimizerVariable": "_dynamo.variables.optimizer.OptimizerVariable"}
# Called by Dynamo alone: what it does is judged by what a compiled step does, whatever its methods are called.
CALLED_BY_TORCH = ("dynamo.OptimizerVariable",)
LEFT_OUT = {
    "cuda.amp.amp_definitely_not_available": "asks whether this torch was built with CUDA; not part of AMP's behaviour"
}
_BOUND = re.compile(r"(>=|<)(\d+)\.(\d+)")  # of a range of torch versions
_DUNDER_METHODS = ("__call__", "__enter__", "__exit__", "__getstate__", "__setstate__")


@dataclass(frozen=True)
class SurfaceItem:
    path: str  # of the name, e.g. `amp.GradScaler`
    method: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        name = f"{self.path}.{self.method}" if self.method and self.method != "__init__" else self.path
        return f"{name}({self.parameter})" if self.parameter else name


def torch_version() -> str:
    """The installed torch's, such as `2.13`."""
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
    """torch's object at a path below `torch`."""
    module, name = _place(path)
    return getattr(importlib.import_module(module), name)


def is_imported(path: str) -> bool:
    """Whether torch's module of a name is: Dynamo, which takes a second, torch imports only when it is needed."""
    return _place(path)[0] in sys.modules


def is_defined_in_its_module(path: str) -> bool:
    """What replaces a class may bear its name, and derives from it then."""
    found = resolve(path)
    bases = {(base.__module__, base.__qualname__) for base in found.__mro__[1:]}
    return found.__module__ == _place(path)[0] and (found.__module__, found.__qualname__) not in bases


def _place(path: str) -> tuple[str, str]:
    """torch's module of a name, and what it is called there."""
    module, _, name = f"torch.{PRIVATE_IN_TORCH.get(path, path)}".rpartition(".")
    return module, name


@functools.cache
def names() -> tuple[str, ...]:
    """Every public name once: its path below `torch`."""
    found: dict[str, Any] = {}
    for module_path in MODULES:
        module = importlib.import_module(f"torch.{module_path}")
        public = getattr(module, "__all__", None) or _defined_in(module)
        for name in sorted(public):
            value = getattr(module, name)
            path = _shortest(module_path, name)
            if (
                not inspect.ismodule(value)
                and path not in LEFT_OUT
                and all(value is not seen for seen in found.values())
            ):
                found[path] = value
    return (*found, *ADDED)


@functools.cache
def given() -> tuple[str, ...]:
    """The enums and configurations that FSDP1 is given: no names that are judged by themselves."""
    beside = importlib.import_module("torch.distributed.fsdp")
    found = {f"distributed.fsdp.{name}": getattr(beside, name) for name in beside.__all__}
    return tuple(path for path, value in found.items() if path not in names() and _is_plain(value))


def _is_plain(value: Any) -> bool:
    return inspect.isclass(value) and (issubclass(value, enum.Enum) or is_dataclass(value))


def _defined_in(module: ModuleType) -> list[str]:
    """Names without an underscore, but for what the module imports from elsewhere."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(module.__name__)
    ]


def _shortest(module_path: str, name: str) -> str:
    """`nn.utils.clip_grad_norm_` rather than `nn.utils.clip_grad.clip_grad_norm_` where torch offers both."""
    package = module_path.rpartition(".")[0]
    offered = bool(package) and getattr(importlib.import_module(f"torch.{package}"), name, None)
    own = getattr(importlib.import_module(f"torch.{module_path}"), name)
    return f"{package}.{name}" if offered is own else f"{module_path}.{name}"


@functools.cache
def items() -> tuple[SurfaceItem, ...]:
    return tuple(item for path in names() for item in _items_of(path, resolve(path)))


def owner(item: str) -> str:
    """The name that an item is, or is a method or parameter of; an item of no name that is known is its own."""
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
                given = parameters(function)[0 if is_static else 1 :]
                yield from (SurfaceItem(path, method, name) for name in given)
    else:
        yield from (SurfaceItem(path, "", name) for name in parameters(value))


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)

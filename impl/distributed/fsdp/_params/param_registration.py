"""Registration of a unit's tensors in its modules: views while it is unsharded, else placeholders or shards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._params.tensor_parallel import ParallelLayout

# Name and weak reference to the new owner of each parameter that sharding has taken out of its modules. Optimizers may
# still have it. An attribute would be saved with it.
_replaced = WeakTensorKeyDictionary()


class ShardedPlaceholder(Tensor):
    """Placeholder in a module for a sharded parameter, with the parameter's shape, dtype and device."""

    _name: str

    @classmethod
    def of(cls, view: Tensor, name: str, *, device: torch.device | None = None) -> Self:
        placeholder = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]  torch has no stub for it
            cls,
            view.shape,
            strides=view.stride(),
            dtype=view.dtype,
            device=device or view.device,
            requires_grad=view.requires_grad,
        )
        placeholder._name = name
        return placeholder

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = next((a._name for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), "a parameter")
        raise RuntimeError(
            f"{func} was called with {name}, whose elements are sharded over the ranks; wrap the module whose forward "
            "reads it, or read it inside FullyShardedDataParallel.summon_full_params(module)"
        )


@dataclass(frozen=True)
class ParamLocation:
    """Module and attribute name of a parameter."""

    module: nn.Module
    attribute: str
    path: str = field(default="", compare=False)  # name in the model, once its root is known

    def __str__(self) -> str:
        return self.path or f"{type(self.module).__name__}.{self.attribute}"

    def in_model(self, module_names: Mapping[nn.Module, str]) -> Self:
        """Return the location with its name in a model, unless its module is in another one."""
        if self.module not in module_names:
            return self
        prefix = module_names[self.module]
        return replace(self, path=f"{prefix}.{self.attribute}" if prefix else self.attribute)


@dataclass(frozen=True)
class ParamInfo:
    """Name and places of a parameter that a unit manages."""

    name: str  # relative to the unit's module, without wrapper prefixes
    locations: tuple[ParamLocation, ...]
    # Set for a DTensor, whose local tensor the unit shards.
    parallel: ParallelLayout | None = None

    def wrap_local(self, local: Tensor) -> Tensor:
        """Return `local`, as a DTensor if the parameter is one. Modules and users see the result."""
        return local if self.parallel is None else self.parallel.dtensor(local)

    def local_part(self, grad: Tensor | None) -> Tensor | None:
        """Return the local part of a DTensor gradient, or a plain gradient unchanged."""
        return grad if grad is None or self.parallel is None else self.parallel.local_part(grad)


@dataclass(frozen=True)
class ManagedParam:
    """A parameter that a unit takes over."""

    info: ParamInfo
    parameter: nn.Parameter  # a DTensor is replaced by its local tensor
    original: nn.Parameter  # parameter that the modules had


def note_replaced(original: Tensor, name: str, owner: object) -> None:
    """Record that modules no longer have the parameter `original`, whose values `owner` has now."""
    _replaced[original] = name, ref(owner)


def owner_of_replaced(original: Tensor) -> tuple[str, object] | None:
    """Return the name of a replaced parameter and its owner, or None if it is not replaced or its owner is gone."""
    entry: tuple[str, ref[Any]] | None = _replaced.get(original)
    owner = None if entry is None else entry[1]()
    return None if entry is None or owner is None else (entry[0], owner)


@contextmanager
def keeping_order(registries: Iterable[dict[str, Any]]) -> Generator[None]:
    """Context manager after which the `_parameters` of modules have the order from before.

    The parameters of an optimizer, and so its states, have this order.
    """
    orders = [(registry, [*registry]) for registry in registries]
    try:
        yield
    finally:
        for registry, order in orders:
            for name in filter(registry.__contains__, order):
                registry[name] = registry.pop(name)


class ParamRegistration:
    """Places of a unit's parameters in its modules, where one tensor for each parameter is registered.

    Args:
        param_infos: the parameters.
        as_parameters: register parameters, not plain attributes.
    """

    def __init__(self, param_infos: Sequence[ParamInfo], as_parameters: bool) -> None:
        # A module that watches its attributes must be notified. Recurrent modules keep a list of their weights.
        self._watched: list[tuple[nn.Module, str, int]] = []
        self._plain: list[tuple[dict[str, Any], str, int]] = []
        for index, info in enumerate(param_infos):
            for location in info.locations:
                module = location.module
                if not as_parameters:
                    module._parameters.pop(location.attribute, None)
                if type(module).__setattr__ is nn.Module.__setattr__:
                    names = module._parameters if as_parameters else module.__dict__
                    self._plain.append((cast("dict[str, Any]", names), location.attribute, index))
                else:
                    self._watched.append((module, location.attribute, index))

    def register(self, tensors: Sequence[Tensor]) -> None:
        for names, attribute, index in self._plain:
            names[attribute] = tensors[index]
        for module, attribute, index in self._watched:
            setattr(module, attribute, tensors[index])

    def unregister(self) -> None:
        """Remove the tensors and their names from the modules."""
        for names, attribute, _ in self._plain:
            names.pop(attribute, None)
        for module, attribute, _ in self._watched:
            delattr(module, attribute)

    def replacements_of(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor | None]]:
        """Return the tensors that are registered instead of `tensors`, with the indices of their parameters."""
        replacements = [
            (index, names.get(attribute))
            for names, attribute, index in self._plain
            if names.get(attribute) is not tensors[index]
        ]
        for module, attribute, index in self._watched:
            now = getattr(module, attribute, None)
            if now is not tensors[index]:
                replacements.append((index, now))
        return replacements

    def registered(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the tensors that are registered now, with the indices of their parameters."""
        for names, attribute, index in self._plain:
            yield index, names.get(attribute)
        for module, attribute, index in self._watched:
            yield index, getattr(module, attribute, None)

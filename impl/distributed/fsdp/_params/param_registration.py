"""What modules see where their parameters were: views while the unit is unsharded, else a placeholder or a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._params.tensor_parallel import ParallelForm


class ShardedPlaceholder(Tensor):
    """Stands in a module for a parameter whose elements are sharded over the ranks; has its shape, dtype and device."""

    _name: str

    @classmethod
    def of(cls, view: Tensor, name: str, *, device: torch.device | None = None) -> Self:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]  torch has no stub for it
            cls,
            view.shape,
            strides=view.stride(),
            dtype=view.dtype,
            device=device or view.device,
            requires_grad=view.requires_grad,
        )
        made._name = name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = next((a._name for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), "a parameter")
        raise RuntimeError(
            f"{func} was called with {name}, whose elements are sharded over the ranks; read it inside "
            "FullyShardedDataParallel.summon_full_params(module)"
        )


@dataclass(frozen=True)
class ParamLocation:
    """Where a module keeps a parameter."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class ParamInfo:
    """What a unit goes on knowing of a parameter that it took over: its name, and where its modules keep it."""

    name: str  # from the unit's module, cleaned of what wrappers put in
    locations: tuple[ParamLocation, ...]
    parallel: ParallelForm | None = None  # if it is a DTensor, of which the unit shards the local tensor

    def shown(self, local: Tensor) -> Tensor:
        """What modules and users see over memory in the shape of what the unit shards."""
        return local if self.parallel is None else self.parallel.dtensor(local)

    def local_part(self, grad: Tensor | None) -> Tensor | None:
        """Of a gradient of what was shown, what the unit reduces."""
        return grad if grad is None or self.parallel is None else self.parallel.local_part(grad)


@dataclass(frozen=True)
class ManagedParam:
    """A parameter that a unit takes over."""

    info: ParamInfo
    parameter: nn.Parameter  # of a DTensor, one over its local tensor
    original: nn.Parameter  # which modules had


class ParamRegistration:
    """Puts one tensor for each parameter where the unit's modules look for it.

    Args:
        param_infos: the parameters.
        as_parameters: what is shown are registered parameters, rather than plain attributes.
    """

    def __init__(self, param_infos: Sequence[ParamInfo], as_parameters: bool) -> None:
        # A module that watches its attributes (recurrent ones keep a list of their weights) has to be told.
        self._watched: list[tuple[nn.Module, str, int]] = []
        self._plain: list[tuple[dict[str, Any], str, int]] = []
        for index, one in enumerate(param_infos):
            for location in one.locations:
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
        """Take them away, names and all."""
        for names, attribute, _ in self._plain:
            names.pop(attribute, None)
        for module, attribute, _ in self._watched:
            delattr(module, attribute)

    def replaced(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor | None]]:
        """What stands there now instead of these, with the number of the parameter it stands for."""
        found = [
            (index, names.get(attribute))
            for names, attribute, index in self._plain
            if names.get(attribute) is not tensors[index]
        ]
        for module, attribute, index in self._watched:
            now = getattr(module, attribute, None)
            if now is not tensors[index]:
                found.append((index, now))
        return found

    def registered(self) -> Iterator[tuple[int, Tensor | None]]:
        """What stands there now, with the number of the parameter it stands for."""
        for names, attribute, index in self._plain:
            yield index, names.get(attribute)
        for module, attribute, index in self._watched:
            yield index, getattr(module, attribute, None)

"""Names of the parameters that an optimizer steps: in its own state dict, and in saved ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._state_dict.redistribution import Redistribution
from impl.optim._optimizers import params_of

Key = int | str
StateDict = dict[str, Any]


class OptimStateKeyType(Enum):
    """Keys of parameters in an optimizer's state dict: their names in a model, or their numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True, eq=False)
class NamedHandle:
    """Flat parameter with the names of its parameters in the model whose optimizer is saved."""

    handle: FlatParamGroup
    wrapper: Wrapper  # FullyShardedDataParallel of the flat parameter
    names: tuple[str, ...]

    @property
    def unit(self) -> Unit[FlatParamGroup]:
        return self.wrapper._unit

    def redistribution(self) -> Redistribution:
        return Redistribution(self.handle.layout, self.wrapper._groups, self.handle.device, self.unit.name)


def is_stepped_unsharded(named: NamedHandle) -> bool:
    """Return whether the parameters are stepped unsharded and one by one, so that their states may have any shape."""
    return named.handle.use_orig_params and not named.handle.is_sharded


@dataclass(frozen=True)
class Stepped:
    """A parameter of an optimizer. A flat one without `use_orig_params` has several names, others have one."""

    names: tuple[str, ...]
    named_handle: NamedHandle | None  # absent if no unit manages the parameter
    current: str  # current name in the model

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def index(self) -> int:
        """Index of the first name among the flat parameter's parameters."""
        assert self.named_handle is not None
        return self.named_handle.names.index(self.name)


class ParamNames:
    """Parameters of a model in `named_modules` order, with their names before wrapping.

    Args:
        model: any module.
        wrappers: every FullyShardedDataParallel at and below it.
    """

    def __init__(self, model: nn.Module, wrappers: Sequence[Wrapper]) -> None:
        self._model = model
        prefixes = {module: clean_name(f"{name}.") if name else "" for name, module in model.named_modules()}
        self.handles = [
            NamedHandle(handle, wrapper, tuple(prefixes[wrapper] + slot.name for slot in handle.layout.slots))
            for wrapper in wrappers
            for handle in wrapper._unit.param_groups
        ]
        self.handle_of = {name: named for named in self.handles for name in named.names}
        managed = {tensor: entry for named in self.handles for tensor, entry in _managed_by(named)}
        self.stepped: dict[nn.Parameter, Stepped] = {}
        for name, tensor in model.named_parameters():
            parameter, names, named_handle = managed.get(tensor, (tensor, (clean_name(name),), None))
            self.stepped.setdefault(parameter, Stepped(names, named_handle, name))

    def of(self, parameter: nn.Parameter) -> Stepped:
        """Return the names of a stepped parameter.

        Raises:
            KeyError: the model does not have the parameter.
        """
        if parameter not in self.stepped:
            raise KeyError(
                f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that the model does not have; pass "
                "the model whose parameters the optimizer was created with, outside of summon_full_params()"
            )
        return self.stepped[parameter]

    def names_of_params(self) -> dict[nn.Parameter, str]:
        """Return the name of each stepped parameter.

        Raises:
            RuntimeError: a flat parameter has several names.
        """
        for stepped in self.stepped.values():
            if len(stepped.names) > 1:
                raise RuntimeError(
                    "Each parameter should only map to one parameter name but got "
                    f"{len(stepped.names)}: {[*stepped.names]}"
                )
        return {parameter: stepped.name for parameter, stepped in self.stepped.items()}

    def keyed(self, source: ParamSource, is_named: bool = False) -> dict[Key, nn.Parameter]:
        """Return the stepped parameters by the keys of the optimizer's state dict: numbers, or names if `is_named`."""
        parameters = source.parameters(self._model)
        if is_named:
            return {self.of(parameter).current: parameter for parameter in parameters}
        return dict(enumerate(parameters))


def _managed_by(
    named: NamedHandle,
) -> Iterator[tuple[Tensor, tuple[nn.Parameter, tuple[str, ...], NamedHandle]]]:
    """Yield each tensor that modules have, with the parameter that an optimizer steps and its names."""
    handle = named.handle
    if not handle.use_orig_params:
        yield handle.flat_param, (handle.flat_param, named.names, named)
        return
    for parameter, name in zip(handle.parameters, named.names, strict=True):
        yield parameter, (parameter, (name,), named)
    for index, tensor in handle.registration.registered():
        # A view, while the unit is unsharded.
        if tensor is not None:
            yield tensor, (handle.parameters[index], (named.names[index],), named)


@dataclass(frozen=True)
class ParamSource:
    """Source of the parameters that an optimizer steps, in order: the optimizer, or the argument that created it."""

    optim: Optimizer | None
    optim_input: Any = None

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that the optimizer steps.

        Raises:
            TypeError, ValueError: `optim_input` is not a valid argument of an optimizer.
        """
        if self.optim_input is None and self.optim is not None:
            return params_of(self.optim)
        if self.optim_input is None:
            return list(model.parameters())
        return _parameters_of_input(self.optim_input)


def _parameters_of_input(optim_input: Iterable[object]) -> list[nn.Parameter]:
    try:
        entries: list[Any] = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not entries:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(entry, Tensor) for entry in entries):
        return entries
    if not all(isinstance(entry, dict) for entry in entries):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    if not all("params" in group for group in entries):
        raise AssertionError('A parameter group should map "params" to a list of the parameters in the group')
    return [parameter for group in entries for parameter in group["params"]]


def is_keyed_by_name(state_dict: StateDict) -> bool:
    """Return whether the optimizer's own state dict has names as keys. Without any state the keys are numbers."""
    return any(isinstance(key, str) for key in [*(state_dict.get("state") or ())][:1])


def rekey(
    state_dict: StateDict,
    key_type: object,
    model: nn.Module,
    wrappers: Sequence[Wrapper],
    source: ParamSource,
) -> StateDict:
    """Return a state dict of an unwrapped model's optimizer with the other type of keys.

    A dict that has the requested keys is returned unchanged.

    Raises:
        AssertionError: `key_type` is not an `OptimStateKeyType` of Tandem or torch.
        ValueError: the dict has keys of both types.
        RuntimeError: the model has flat parameters.
    """
    expected = getattr(key_type, "name", None)
    if expected not in OptimStateKeyType.__members__:
        raise AssertionError(f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {key_type}")
    types = {type(key) for key in state_dict["state"]}
    if len(types) > 1 and types & {int, str}:
        raise ValueError(f"Invalid parameter keys: {state_dict['state'].keys()}")
    if types <= {str if expected == OptimStateKeyType.PARAM_NAME.name else int}:
        return state_dict
    names = ParamNames(model, wrappers)
    name_of = names.names_of_params()
    by_key = names.keyed(source)
    if expected == OptimStateKeyType.PARAM_NAME.name:
        new_of: dict[Any, Any] = {key: name_of[parameter] for key, parameter in by_key.items()}
    else:
        new_of = {name_of[parameter]: key for key, parameter in by_key.items() if parameter in name_of}
    return {
        "state": {new_of[key]: state for key, state in state_dict["state"].items()},
        "param_groups": [
            with_params(group, sorted(new_of[key] for key in group["params"]))
            for group in state_dict["param_groups"]
        ],
    }


def with_params(group: StateDict, params: list[object]) -> StateDict:
    """Return a copy of a parameter group with other parameters."""
    return {key: params if key == "params" else copy.deepcopy(value) for key, value in group.items()}


def unflattened_groups(
    groups: Iterable[StateDict], by_key: dict[Key, nn.Parameter], names: ParamNames
) -> list[StateDict]:
    """Return the parameter groups with names, as they are saved."""
    return [
        with_params(group, [name for key in group["params"] for name in names.of(by_key[key]).names])
        for group in groups
    ]


def flattened_groups(groups: Sequence[StateDict], key_of: dict[str, Key]) -> list[StateDict]:
    """Return the parameter groups with an optimizer's own keys, as it loads them.

    Raises:
        KeyError: a name belongs to no parameter that the optimizer steps.
    """
    named = {name for group in groups for name in group["params"]}
    unknown = sorted(named - key_of.keys())
    if unknown:
        error = KeyError(unknown[0])
        error.add_note(f"parameter groups name {unknown[:3]}, which the optimizer does not step")
        raise error
    keys = [cast("set[Any]", {key_of[name] for name in group["params"]}) for group in groups]
    return [with_params(group, sorted(params)) for group, params in zip(groups, keys, strict=True)]

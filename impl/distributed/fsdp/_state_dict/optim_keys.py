"""What the parameters that an optimizer steps are called: in its own state dict, and in those that are saved."""

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

Key = int | str
StateDict = dict[str, Any]


class OptimStateKeyType(Enum):
    """What an optimizer's state dict calls parameters: by their names in a model, or by their numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True, eq=False)
class NamedHandle:
    """A flat buffer, and what its parameters are called in the model whose optimizer it is."""

    handle: FlatParamGroup
    wrapper: Wrapper  # the FullyShardedDataParallel whose it is
    names: tuple[str, ...]

    @property
    def unit(self) -> Unit[FlatParamGroup]:
        return self.wrapper._unit

    def redistribution(self) -> Redistribution:
        return Redistribution(self.handle.layout, self.wrapper._groups, self.handle.device, self.unit.name)


def is_stepped_unsharded(one: NamedHandle) -> bool:
    """Whether its parameters are stepped unsharded and by themselves, so that their state may have any shape."""
    return one.handle.use_orig_params and not one.handle.is_sharded


@dataclass(frozen=True)
class Stepped:
    """One parameter of an optimizer: of a flat one without `use_orig_params` all names, else one."""

    names: tuple[str, ...]
    within: NamedHandle | None  # None: no unit manages it
    current: str  # what the model calls it now

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def index(self) -> int:
        """Of the first name among the flat parameter's parameters."""
        assert self.within is not None
        return self.within.names.index(self.name)


class Names:
    """The parameters of a model, in the order in which `named_modules` meets them, as they were called before wrapping.

    Args:
        model: any module.
        wrappers: every FullyShardedDataParallel at and below it.
    """

    def __init__(self, model: nn.Module, wrappers: Sequence[Wrapper]) -> None:
        self._model = model
        prefixes = {module: clean_name(f"{name}.") if name else "" for name, module in model.named_modules()}
        self.handles = [
            NamedHandle(handle, one, tuple(prefixes[one] + slot.name for slot in handle.layout.slots))
            for one in wrappers
            for handle in one._unit.param_groups
        ]
        self.handle_of = {name: one for one in self.handles for name in one.names}
        managed = {tensor: found for one in self.handles for tensor, found in _managed_by(one)}
        self.stepped: dict[nn.Parameter, Stepped] = {}
        for name, tensor in model.named_parameters():
            parameter, names, within = managed.get(tensor, (tensor, (clean_name(name),), None))
            self.stepped.setdefault(parameter, Stepped(names, within, name))

    def of(self, parameter: nn.Parameter) -> Stepped:
        """
        Raises:
            KeyError: the model does not have the parameter.
        """
        if parameter not in self.stepped:
            raise KeyError(
                f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that the model does not have; hand "
                "over the model whose parameters the optimizer was made for, outside of summon_full_params()"
            )
        return self.stepped[parameter]

    def single(self) -> dict[nn.Parameter, str]:
        """
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

    def keyed(self, source: Source, is_named: bool = False) -> dict[Key, nn.Parameter]:
        """What an optimizer steps by the keys of its state dict: numbers, or for one that is `is_named` names."""
        parameters = source.parameters(self._model)
        if is_named:
            return {self.of(parameter).current: parameter for parameter in parameters}
        return dict(enumerate(parameters))


def _managed_by(
    one: NamedHandle,
) -> Iterator[tuple[Tensor, tuple[nn.Parameter, tuple[str, ...], NamedHandle]]]:
    """By what modules show: the parameter that an optimizer steps, and the names in it."""
    handle = one.handle
    if not handle.use_orig_params:
        yield handle.flat_param, (handle.flat_param, one.names, one)
        return
    for parameter, name in zip(handle.parameters, one.names, strict=True):
        yield parameter, (parameter, (name,), one)
    for index, shown in handle.registered():
        # While the unit is unsharded, a view.
        if shown is not None:
            yield shown, (handle.parameters[index], (one.names[index],), one)


@dataclass(frozen=True)
class Source:
    """Where to read which parameters an optimizer steps, in order: the optimizer, or what it was made of."""

    optim: Optimizer | None
    optim_input: Any = None

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """
        Raises:
            TypeError, ValueError: `optim_input` is not what an optimizer is made of.
        """
        if self.optim_input is None and self.optim is not None:
            return [parameter for group in self.optim.param_groups for parameter in group["params"]]
        if self.optim_input is None:
            return list(model.parameters())
        return _parameters_of_input(self.optim_input)


def _parameters_of_input(optim_input: Iterable[Any]) -> list[nn.Parameter]:
    try:
        given: list[Any] = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not given:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(one, Tensor) for one in given):
        return given
    if not all(isinstance(one, dict) for one in given):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    if not all("params" in group for group in given):
        raise AssertionError('A parameter group should map "params" to a list of the parameters in the group')
    return [parameter for group in given for parameter in group["params"]]


def is_keyed_by_name(state_dict: StateDict) -> bool:
    """Whether it is of an optimizer whose own state dict has names for keys; one without state is taken not to be."""
    return any(isinstance(key, str) for key in [*(state_dict.get("state") or ())][:1])


def rekeyed(
    state_dict: StateDict, key_type: Any, model: nn.Module, wrappers: Sequence[Wrapper], source: Source
) -> StateDict:
    """A state dict of an unwrapped model's optimizer by the other kind of keys; itself, if it has them already.

    Raises:
        AssertionError: `key_type` is no `OptimStateKeyType`; torch's will do.
        ValueError: it has keys of both kinds.
        RuntimeError: the model has flat parameters.
    """
    expected = getattr(key_type, "name", None)
    if expected not in OptimStateKeyType.__members__:
        raise AssertionError(f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {key_type}")
    kinds = {type(key) for key in state_dict["state"]}
    if len(kinds) > 1 and kinds & {int, str}:
        raise ValueError(f"Invalid parameter keys: {state_dict['state'].keys()}")
    if kinds <= {str if expected == OptimStateKeyType.PARAM_NAME.name else int}:
        return state_dict
    names = Names(model, wrappers)
    name_of = names.single()
    keyed = names.keyed(source)
    if expected == OptimStateKeyType.PARAM_NAME.name:
        new_of: dict[Any, Any] = {key: name_of[parameter] for key, parameter in keyed.items()}
    else:
        new_of = {name_of[parameter]: key for key, parameter in keyed.items() if parameter in name_of}
    return {
        "state": {new_of[key]: state for key, state in state_dict["state"].items()},
        "param_groups": [
            with_params(group, sorted(new_of[key] for key in group["params"]))
            for group in state_dict["param_groups"]
        ],
    }


def with_params(group: StateDict, params: list[Any]) -> StateDict:
    """A copy of a parameter group that names other parameters."""
    return {key: params if key == "params" else copy.deepcopy(value) for key, value in group.items()}


def unflattened_groups(
    groups: Iterable[StateDict], keyed: dict[Key, nn.Parameter], names: Names
) -> list[StateDict]:
    """Parameter groups by names, as they are saved."""
    return [
        with_params(group, [name for key in group["params"] for name in names.of(keyed[key]).names])
        for group in groups
    ]


def flattened_groups(groups: Sequence[StateDict], key_of: dict[str, Key]) -> list[StateDict]:
    """Parameter groups by an optimizer's own keys, as it loads them.

    Raises:
        KeyError: a name is of no parameter that the optimizer steps.
    """
    named = {name for group in groups for name in group["params"]}
    unknown = sorted(named - key_of.keys())
    if unknown:
        error = KeyError(unknown[0])
        error.add_note(f"parameter groups name {unknown[:3]}, which the optimizer does not step")
        raise error
    keys = [cast("set[Any]", {key_of[name] for name in group["params"]}) for group in groups]
    return [with_params(group, sorted(params)) for group, params in zip(groups, keys, strict=True)]

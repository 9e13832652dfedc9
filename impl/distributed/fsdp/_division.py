"""Which unit manages which parameter of a module tree.

Trees may share: one module may stand at several places, and one parameter in several modules.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterator

from torch import nn

_Units = tuple[nn.Module, ...]  # each inside the one before


def post_order(root: nn.Module) -> dict[nn.Module, str]:
    """Each module once, with the name of its first place; those inside come before those around them."""
    names: dict[nn.Module, str] = {}
    met = {root}

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            if child not in met:
                met.add(child)
                visit(child, _joined(name, child_name))
        names[module] = name

    visit(root, "")
    return names


def places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Every (parent, name) at which each submodule stands."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


class Division:
    """The parameters of a tree dealt to its units: each to the innermost one around every use of it.

    So a parameter that two units share, neither inside the other, goes to a unit around both, or to the root; and
    one in a module that stands in two units to a unit around both, if it is no unit itself.
    """

    def __init__(
        self, root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter]
    ) -> None:
        """`units` may leave out the root, which is one in any case."""
        self.names = post_order(root)
        self._position = {module: index for index, module in enumerate(self.names)}
        self._manager = {
            parameter: around[-1]
            for parameter, around in self._units_around(root, units).items()
            if parameter not in ignored_params
        }

    def left_to_ancestors(self, unit: nn.Module) -> frozenset[nn.Parameter]:
        """The parameters below `unit` that a unit around it manages, because they are used outside too."""
        return frozenset(
            parameter
            for parameter in unit.parameters()
            if parameter in self._manager and self._position[self._manager[parameter]] > self._position[unit]
        )

    def managed_by(self, unit: nn.Module) -> dict[nn.Parameter, str]:
        """What `unit` manages, with names from the root, level by level as torch lists them."""
        managed: dict[nn.Parameter, str] = {}
        for name, module in _level_by_level(unit, self.names[unit]):
            for own_name, parameter in module.named_parameters(recurse=False):
                if self._manager.get(parameter) is unit:
                    managed[parameter] = _joined(name, own_name)
        return managed

    def _units_around(self, root: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, _Units]:
        """For each parameter the units around every use of it, whichever way a forward gets there."""
        modules: dict[nn.Module, _Units] = {root: ()}
        parameters: dict[nn.Parameter, _Units] = {}
        for module in reversed(self.names):  # one comes when all that are around it have been
            inside = modules[module]
            if module in units or module is root:
                inside = (*inside, module)
            for child in module.children():
                modules[child] = _common(modules.get(child, inside), inside)
            for parameter in module.parameters(recurse=False):
                parameters[parameter] = _common(parameters.get(parameter, inside), inside)
        return parameters


def refuse_or_warn_of_frozen(division: Division, unit: nn.Module, use_orig_params: bool) -> None:
    """Speak up about a unit that manages frozen and trainable parameters.

    Raises:
        ValueError: it does, and `use_orig_params` is not set. If it is, a warning says so.
    """
    managed = division.managed_by(unit)
    trainable = {parameter: name for parameter, name in managed.items() if parameter.requires_grad}
    frozen = {parameter: name for parameter, name in managed.items() if not parameter.requires_grad}
    if not trainable or not frozen:
        return
    if use_orig_params:
        advice = (
            "We do not recommend wrapping such modules since the gradient memory usage will be higher than expected "
            f"({_numel(managed)} numel instead of {_numel(trainable)} numel before sharding via reduce-scatter)."
        )
    else:
        advice = "FSDP does not support wrapping such modules when use_orig_params=False."
    message = (
        f"{division.names[unit]} has both parameters with requires_grad=True and False. {advice} "
        "If possible, wrap the frozen parameters with FSDP separately.\n"
        f"The following parameters have requires_grad=True:\n{list(trainable.values())}\n"
        f"The following parameters have requires_grad=False:\n{list(frozen.values())}"
    )
    if not use_orig_params:
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def _numel(parameters: Collection[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _level_by_level(root: nn.Module, root_name: str) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, parents before children, by the breadth."""
    waiting, met = deque([(root_name, root)]), {root}
    while waiting:
        name, module = waiting.popleft()
        yield name, module
        for child_name, child in module.named_children():
            if child not in met:
                met.add(child)
                waiting.append((_joined(name, child_name), child))


def _common(one: _Units, other: _Units) -> _Units:
    return tuple(unit for unit in one if unit in other)


def _joined(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner

"""Assignment of the parameters of a module tree to units.

Modules may be shared: one module may be at several places, and one parameter in several modules.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

_Units = tuple[nn.Module, ...]  # each inside the previous one


def post_order(root: nn.Module) -> list[nn.Module]:
    """Return each module once, inner modules before outer ones."""
    ordered: list[nn.Module] = []
    visited = {root}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in visited:
                visited.add(child)
                visit(child)
        ordered.append(module)

    visit(root)
    return ordered


def parents_of(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return every (parent, name) under which each submodule is registered."""
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, name))
    return parents


class ParamAssignment:
    """Parameters of a tree assigned to its units: each to the innermost unit around every use of it.

    A parameter that two units share, neither inside the other, belongs to a unit around both, or to the root. A
    parameter of a module that is part of two units belongs to a unit around both, unless the module is a unit itself.
    """

    def __init__(
        self, root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter]
    ) -> None:
        """Assign the parameters. `units` may omit the root, which is always a unit."""
        self.order = post_order(root)
        self._position = {module: index for index, module in enumerate(self.order)}
        self._manager = {
            parameter: around[-1]
            for parameter, around in self._units_around(root, units).items()
            if parameter not in ignored_params
        }

    def left_to_ancestors(self, unit: nn.Module) -> frozenset[nn.Parameter]:
        """Return the parameters below `unit` that an outer unit manages because they are used outside `unit` too."""
        return frozenset(
            parameter
            for parameter in unit.parameters()
            if parameter in self._manager and self._position[self._manager[parameter]] > self._position[unit]
        )

    def _units_around(self, root: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, _Units]:
        """Return the units around every use of each parameter, whichever path a forward takes."""
        modules: dict[nn.Module, _Units] = {root: ()}
        parameters: dict[nn.Parameter, _Units] = {}
        for module in reversed(self.order):  # outer modules come first
            inside = modules[module]
            if module in units or module is root:
                inside = (*inside, module)
            for child in module.children():
                modules[child] = _common(modules.get(child, inside), inside)
            for parameter in module.parameters(recurse=False):
                parameters[parameter] = _common(parameters.get(parameter, inside), inside)
        return parameters


def _common(units: _Units, other: _Units) -> _Units:
    return tuple(unit for unit in units if unit in other)

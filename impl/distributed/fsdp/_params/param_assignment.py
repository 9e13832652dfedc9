"""Which unit manages which parameter of a module tree.

Trees may share: one module may stand at several places, and one parameter in several modules.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

_Units = tuple[nn.Module, ...]  # each inside the one before


def post_order(root: nn.Module) -> list[nn.Module]:
    """Each module once; those inside come before those around them."""
    ordered: list[nn.Module] = []
    met = {root}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in met:
                met.add(child)
                visit(child)
        ordered.append(module)

    visit(root)
    return ordered


def parents_of(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Every (parent, name) at which each submodule stands."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


class ParamAssignment:
    """The parameters of a tree assigned to its units: each to the innermost one around every use of it.

    So a parameter that two units share, neither inside the other, goes to a unit around both, or to the root; and
    one in a module that stands in two units to a unit around both, if it is no unit itself.
    """

    def __init__(
        self, root: nn.Module, units: Collection[nn.Module], ignored_params: Collection[nn.Parameter]
    ) -> None:
        """`units` may leave out the root, which is one in any case."""
        self.order = post_order(root)
        self._position = {module: index for index, module in enumerate(self.order)}
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

    def _units_around(self, root: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, _Units]:
        """For each parameter the units around every use of it, whichever way a forward gets there."""
        modules: dict[nn.Module, _Units] = {root: ()}
        parameters: dict[nn.Parameter, _Units] = {}
        for module in reversed(self.order):  # one comes when all that are around it have been
            inside = modules[module]
            if module in units or module is root:
                inside = (*inside, module)
            for child in module.children():
                modules[child] = _common(modules.get(child, inside), inside)
            for parameter in module.parameters(recurse=False):
                parameters[parameter] = _common(parameters.get(parameter, inside), inside)
        return parameters


def _common(one: _Units, other: _Units) -> _Units:
    return tuple(unit for unit in one if unit in other)

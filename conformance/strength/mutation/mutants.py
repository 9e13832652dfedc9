"""Import of a subject with changed source.

`package+mutant:amp.grad_scaler:return_early:0` names one mutant, and `package+lines:all` source that records which of
its lines are executed. A spec is a string that every process can load, so ranks run the same source.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec

from conformance.exact_copy import copying
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import LINES, MUTANT, file_of, parsed
from conformance.strength.mutation.operators import mutate

Change = Callable[[ast.Module], object]


def change_source(package: str, fault_id: str) -> None:
    """Change the source of the package's modules as `fault_id` says, and import them again when they are used.

    Raises:
        LookupError: there is no such change.
    """
    finder = _Finder(package, _changes(package, fault_id))
    root = importlib.import_module(package)
    for name in [name for name in sys.modules if name.startswith(f"{package}.") and name != copying.__name__]:
        del sys.modules[name]
        vars(root).pop(name.removeprefix(f"{package}.").partition(".")[0], None)
    sys.meta_path.insert(0, finder)


def _changes(package: str, fault_id: str) -> dict[str, Change]:
    if fault_id == LINES:
        return {
            module: functools.partial(lines.instrument, first=numbers.start)
            for module, numbers in lines.numbered(package).items()
        }
    module, operator, number = fault_id.removeprefix(MUTANT).split(":")
    return {module: lambda tree: mutate(tree, operator, int(number))}


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str, changes: dict[str, Change]) -> None:
        self._package = package
        self._changes = {f"{package}.{module}": (module, change) for module, change in changes.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._changes:
            return None
        module, change = self._changes[fullname]
        tree = parsed(self._package, module)
        change(tree)
        if self._package == copying.ROOT:
            return copying.spec_of(module, tree)
        return ModuleSpec(fullname, copying.Loader(file_of(self._package, module), lambda: tree))

"""Definitions out of a package's own source, without importing the package: it may want a device that is not here.

The lines that run are the package's. What differs is named where they are taken: objects that they find in the place
of others (a process group of one, a device's tensor type), texts, attributes, and calls that are left out.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Instead:
    """What definitions find in the place of what their package has."""

    # By name, or by a dotted name: {"dist": …, "torch.cuda.FloatTensor": torch.FloatTensor}
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Sequence[str] = ()  # methods: `tensor.pin_memory()` is `tensor`


def definitions(distribution: str, file: str, names: Sequence[str], instead: Instead) -> SimpleNamespace:
    """Functions and classes of a file of an installed distribution, with what the file imports from torch and Python.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
        LookupError: the file has no such definition.
    """
    path = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
    tree = ast.parse(path.read_text())
    kept = [statement for statement in tree.body if _is_kept(statement, names)]
    tree.body = [
        *ast.parse("from __future__ import annotations").body,
        *kept,
    ]  # hints may name what is not there
    tree = ast.fix_missing_locations(_Replaced(instead).visit(tree))
    # A module that pickle finds them in again.
    module = types.ModuleType(f"{__name__}_{re.sub(r'[^0-9A-Za-z]', '_', f'{distribution}_{file}')}")
    sys.modules[module.__name__] = module
    namespace = vars(module)
    namespace |= {_name(dotted): found for dotted, found in instead.objects.items()}
    exec(compile(tree, str(path), "exec"), namespace)
    if missing := [name for name in names if name not in namespace]:
        raise LookupError(f"{path} of {distribution} does not define {', '.join(missing)} in this version")
    return SimpleNamespace(**{name: namespace[name] for name in names})


def refuse(**arguments: bool) -> None:
    """What a package's function has no argument for, it cannot be asked for."""
    if asked := [name for name, value in arguments.items() if value]:
        raise TypeError(f"the package has no argument {', '.join(asked)}")


def _is_kept(statement: ast.stmt, names: Sequence[str]) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name in names
    if isinstance(statement, ast.Import):
        return all(_is_at_hand(alias.name) for alias in statement.names)
    return (
        isinstance(statement, ast.ImportFrom) and not statement.level and _is_at_hand(statement.module or "")
    )


def _is_at_hand(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def _name(dotted: str) -> str:
    return dotted.replace(".", "__")


class _Replaced(ast.NodeTransformer):
    def __init__(self, instead: Instead) -> None:
        self._instead = instead

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        text = self._instead.texts.get(node.value) if isinstance(node.value, str) else None
        return node if text is None else ast.copy_location(ast.Constant(text), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if (dotted := ast.unparse(node)) in self._instead.objects:
            return ast.copy_location(ast.Name(_name(dotted), node.ctx), node)
        node.attr = self._instead.attributes.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr in self._instead.left_out:
            return self.visit(node.func.value)
        return self.generic_visit(node)

"""Definitions from a package's source, without its import, which may need a device that this host lacks.

The code that runs is the package's. The caller names each replacement: objects that the code finds instead
of others (a process group of one rank, a device's tensor type), texts, attributes, and calls that are left out.
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
    """Replacements for objects, texts and attributes of a package's definitions."""

    # By name, or by a dotted name: {"dist": …, "torch.cuda.FloatTensor": torch.FloatTensor}
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Sequence[str] = ()  # methods: `tensor.pin_memory()` is `tensor`


def definitions(distribution: str, file: str, names: Sequence[str], instead: Instead) -> SimpleNamespace:
    """Return functions and classes of a file of an installed distribution. Its imports of torch and Python work too.

    Raises:
        importlib.metadata.PackageNotFoundError: the distribution is not installed.
        LookupError: the file has no such definition.
    """
    path = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
    tree = ast.parse(path.read_text())
    statements = [statement for statement in tree.body if _is_kept(statement, names)]
    # Annotations stay text, because hints may name missing objects.
    tree.body = [*ast.parse("from __future__ import annotations").body, *statements]
    tree = ast.fix_missing_locations(_Replaced(instead).visit(tree))
    # pickle finds the definitions again in this module.
    module = types.ModuleType(f"{__name__}_{re.sub(r'[^0-9A-Za-z]', '_', f'{distribution}_{file}')}")
    sys.modules[module.__name__] = module
    namespace = vars(module)
    namespace |= {_name(dotted): replacement for dotted, replacement in instead.objects.items()}
    exec(compile(tree, str(path), "exec"), namespace)
    if missing := [name for name in names if name not in namespace]:
        raise LookupError(f"{path} of {distribution} does not define {', '.join(missing)} in this version")
    return SimpleNamespace(**{name: namespace[name] for name in names})


def refuse(**arguments: bool) -> None:
    """Raise TypeError for arguments that the package does not have."""
    if requested := [name for name, value in arguments.items() if value]:
        raise TypeError(f"the package has no argument {', '.join(requested)}")


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

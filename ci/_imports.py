"""Imports of this repository's own modules: each must find its module and its name. No file is run.

An attribute of an imported module, and a function that a string names as `module:function`, must exist too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _environment import ROOT

FOLDERS = ("impl", "conformance", "benchmarks", "ci")
_PLACE = re.compile(rf"((?:{'|'.join(FOLDERS)})(?:\.\w+)+):(\w+)")
_IN_EVERY_MODULE = {"*", "__doc__", "__file__", "__name__", "__path__", "__spec__"}


@dataclass(frozen=True)
class Use:
    line: int
    module: str
    name: str  # empty for an import of the module itself


@dataclass
class ModuleUses:
    defined: Collection[str] = ()
    imported: list[Use] = field(default_factory=list)
    attributes: list[Use] = field(default_factory=list)  # attributes of imported modules and objects


def complaints(root: Path = ROOT) -> list[str]:
    files = [file.relative_to(root) for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    # Commands in ci have no suffix. Its modules import each other without the name of the folder.
    commands = [file.relative_to(root) for file in (root / "ci").glob("[a-z]*") if not file.suffix]
    files += [file for file in commands if (root / file).is_file()]
    readings = {file: read((root / file).read_text(encoding="utf-8"), file) for file in files}
    folders = {parent for file in files for parent in file.parents if parent.parts}
    modules: dict[str, Collection[str]] = {".".join(folder.parts): () for folder in folders}
    modules |= {_module(file): reading.defined for file, reading in readings.items()}
    modules |= {name.removeprefix("ci."): defined for name, defined in modules.items()}
    return [
        f"{file}:{use.line}: {use.module}{use.name and '.'}{use.name} does not exist"
        for file, reading in readings.items()
        for use in missing(reading, modules)
    ]


def missing(reading: ModuleUses, modules: Mapping[str, Collection[str]]) -> Iterator[Use]:
    """Yield the uses that lead nowhere. `modules` has the names that each module of the repository defines."""
    own = {module.partition(".")[0] for module in modules}
    for use in reading.imported:
        if use.module.partition(".")[0] in own and not _exists(use, modules):
            yield use
    for use in reading.attributes:
        if use.module in modules and not _exists(use, modules):
            yield use


def _exists(use: Use, modules: Mapping[str, Collection[str]]) -> bool:
    if use.module not in modules:
        return False
    defined = modules[use.module]
    known = use.name in defined or use.name in _IN_EVERY_MODULE or "__getattr__" in defined
    return known or not use.name or f"{use.module}.{use.name}" in modules


def read(source: str, file: Path) -> ModuleUses:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    reading, aliases = ModuleUses(set(_defined_in(tree))), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            reading.imported += [Use(node.lineno, name.name, "") for name in node.names]
            aliases |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, file)
            reading.imported += [Use(node.lineno, module, name.name) for name in node.names]
            aliases |= {name.asname or name.name: f"{module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Constant) and (match := _PLACE.fullmatch(str(node.value))):
            reading.imported.append(Use(node.lineno, match[1], match[2]))
    for name in _rebound_in(nodes):
        aliases.pop(name, None)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            reading.attributes.append(Use(node.lineno, aliases[node.value.id], node.attr))
    return reading


def _defined_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that code outside of functions and classes binds."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (name.asname or name.name.partition(".")[0] for name in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _defined_in(child)


def _rebound_in(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _absolute(node: ast.ImportFrom, file: Path) -> str:
    package = file.parent.parts
    parents = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*parents, *filter(None, [node.module])])


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")

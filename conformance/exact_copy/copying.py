"""How torch's modules are copied: which, and where the names in them lead.

Imports of copied modules, and chains of public names such as `torch.amp.GradScaler`, lead to the copies; everything
else leads to torch. Torch's own stay, since the rest of torch tells objects by them: enums, what `api` configures,
`_FSDPState`, FSDP2 (whose operators can be registered once only), and private names in chains (Dynamo knows
`torch.amp._enter_autocast` by identity).

Dynamo knows the class that tracks optimizers by what it derives from: the copy derives from torch's, has every method
of it anew, and what it calls of its base is the base's of torch's.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.util
import pkgutil
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = __name__.rpartition(".")[0]
_PACKAGES = ("amp", "cpu.amp", "cuda.amp", "distributed.fsdp")
_SINGLE = ("nn.utils", "nn.utils.clip_grad")
_ON_THE_WAY = ("cpu", "cuda", "distributed", "nn")  # empty packages
_WITH_MODULES = (*_PACKAGES, "nn.utils")
_SHARED_MODULES = ("distributed.fsdp.api", "distributed.fsdp._fully_shard")
_SHARED_CLASSES = ("_FSDPState",)
_DERIVED_CLASSES = ("OptimizerVariable",)
_ELSEWHERE = {"dynamo": "_dynamo.variables.optimizer"}  # what a subject has at another path than torch


@functools.cache
def copied() -> frozenset[str]:
    """The paths below torch of the modules that are copied."""
    found = {*_PACKAGES, *_SINGLE, *_ELSEWHERE}
    for package in _PACKAGES:
        folder = importlib.import_module(f"torch.{package}").__path__
        found |= {f"{package}.{file.name}" for file in pkgutil.iter_modules(folder)}
    return frozenset(found - {*_SHARED_MODULES})


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        if name == fullname or not (name in copied() or name in _ON_THE_WAY):
            return None
        return spec_of(name)


def spec_of(name: str, tree: ast.Module | None = None) -> ModuleSpec:
    """Of the copy of a module; `tree` is taken for torch's source."""
    if name in _ON_THE_WAY:
        return ModuleSpec(f"{ROOT}.{name}", None, is_package=True)
    file = source_of(name)
    loader = Loader(file, lambda: copy_of(name, tree or ast.parse(file.read_text(encoding="utf-8"))))
    return ModuleSpec(f"{ROOT}.{name}", loader, is_package=name in _WITH_MODULES)


class Loader(importlib.abc.Loader):
    """Runs a tree as if it were what stands in the file."""

    def __init__(self, file: Path, tree: Callable[[], ast.Module]) -> None:
        self._file, self._tree = file, tree

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = str(self._file)
        exec(compile(self._tree(), self._file, "exec", dont_inherit=True), vars(module))


def source_of(name: str) -> Path:
    spec = importlib.util.find_spec(_torchs(name))
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def copy_of(name: str, tree: ast.Module) -> ast.Module:
    """The tree of torch's module `name`, its names leading to the copies."""
    package = _torchs(name) if name in _WITH_MODULES else _torchs(name).rpartition(".")[0]
    return ast.fix_missing_locations(_Redirected(_torchs(name), package).visit(tree))


def _torchs(name: str) -> str:
    return f"torch.{_ELSEWHERE.get(name, name)}"


class _Redirected(ast.NodeTransformer):
    def __init__(self, module: str, package: str) -> None:
        self._module, self._package = module, package

    def visit_Import(self, node: ast.Import) -> ast.AST:
        # `import torch.x` binds torch itself, through which chains lead: those are redirected where they are read.
        for alias in node.names:
            if alias.asname:
                alias.name = _led(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), self._package)
        return [
            ast.copy_location(ast.ImportFrom(_led(source, alias.name), [alias], 0), node)
            for alias in node.names
        ]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        is_enum = any(isinstance(base, ast.Name) and base.id == "Enum" for base in node.bases)
        is_at_top = node.col_offset == 0
        if is_at_top and (is_enum or node.name in _SHARED_CLASSES):
            return ast.copy_location(ast.ImportFrom(self._module, [ast.alias(node.name)], 0), node)
        if is_at_top and node.name in _DERIVED_CLASSES:
            return self._derived(node)
        return self.generic_visit(node)

    def _derived(self, node: ast.ClassDef) -> ast.AST:
        """The class on top of torch's, whose own methods are passed over where the class asks its base."""
        module = f"__import__('importlib').import_module({self._module!r})"
        torchs = ast.parse(f"{module}.{node.name}", mode="eval").body
        node.bases = [torchs]
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call) == "super()":
                call.args = [torchs, ast.Name("self", ast.Load())]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        owner = ast.unparse(node.value) if isinstance(node.value, (ast.Attribute, ast.Name)) else ""
        if (
            not owner.startswith("torch.")
            or node.attr.startswith("_")
            or owner.removeprefix("torch.") not in copied()
        ):
            return node
        if f"{owner}.{node.attr}".removeprefix("torch.") in copied():  # a module, on the way to a name of it
            return node
        call = ast.parse(f"__import__('importlib').import_module({_led(owner)!r})", mode="eval").body
        return ast.copy_location(ast.Attribute(call, node.attr, node.ctx), node)


def _led(module: str, name: str = "") -> str:
    """Where an import of torch's module leads, or of this name in it, which may be a module too."""
    path = module.removeprefix("torch.")
    if path == module or path not in copied():
        return module
    is_module = name and path in _WITH_MODULES and importlib.util.find_spec(f"{module}.{name}") is not None
    return module if is_module and f"{path}.{name}" not in copied() else f"{ROOT}.{path}"

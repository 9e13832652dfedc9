"""Copying of torch's modules, and redirection of the names in them.

Imports of copied modules, and chains of public names such as `torch.amp.GradScaler`, refer to the copies. All other
names refer to torch. Some objects are not copied, because the rest of torch recognises them by identity: enums, the
classes of `api`, `_FSDPState`, FSDP2 (whose operators can only be registered once), and private names in chains (Dynamo
recognises `torch.amp._enter_autocast`).

Dynamo recognises the class that tracks optimizers by its base classes. The copy derives from torch's class and has all
of its methods again, and its calls of `super()` skip the methods of torch's class.
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
_EMPTY_PACKAGES = ("cpu", "cuda", "distributed", "nn")
_WITH_MODULES = (*_PACKAGES, "nn.utils")
_SHARED_MODULES = ("distributed.fsdp.api", "distributed.fsdp._fully_shard")
_SHARED_CLASSES = ("_FSDPState",)
_DERIVED_CLASSES = ("OptimizerVariable",)
_TORCH_PATHS = {"dynamo": "_dynamo.variables.optimizer"}  # paths in torch that differ from a subject's


@functools.cache
def copied_modules() -> frozenset[str]:
    """Return the paths below torch of the modules that are copied."""
    modules = {*_PACKAGES, *_SINGLE, *_TORCH_PATHS}
    for package in _PACKAGES:
        folder = importlib.import_module(f"torch.{package}").__path__
        modules |= {f"{package}.{file.name}" for file in pkgutil.iter_modules(folder)}
    return frozenset(modules - {*_SHARED_MODULES})


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{ROOT}.")
        if name == fullname or not (name in copied_modules() or name in _EMPTY_PACKAGES):
            return None
        return spec_of(name)


def spec_of(name: str, tree: ast.Module | None = None) -> ModuleSpec:
    """Return the spec of a module's copy. `tree` replaces torch's source."""
    if name in _EMPTY_PACKAGES:
        return ModuleSpec(f"{ROOT}.{name}", None, is_package=True)
    file = source_of(name)
    loader = Loader(file, lambda: copy_of(name, tree or ast.parse(file.read_text(encoding="utf-8"))))
    return ModuleSpec(f"{ROOT}.{name}", loader, is_package=name in _WITH_MODULES)


class Loader(importlib.abc.Loader):
    """A loader that runs a syntax tree instead of the source of its file."""

    def __init__(self, file: Path, tree: Callable[[], ast.Module]) -> None:
        self._file, self._tree = file, tree

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = str(self._file)
        exec(compile(self._tree(), self._file, "exec", dont_inherit=True), vars(module))


def source_of(name: str) -> Path:
    spec = importlib.util.find_spec(_torch_path(name))
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def copy_of(name: str, tree: ast.Module) -> ast.Module:
    """Redirect the names in the syntax tree of torch's module `name` to the copies."""
    package = _torch_path(name) if name in _WITH_MODULES else _torch_path(name).rpartition(".")[0]
    return ast.fix_missing_locations(_Redirection(_torch_path(name), package).visit(tree))


def _torch_path(name: str) -> str:
    return f"torch.{_TORCH_PATHS.get(name, name)}"


class _Redirection(ast.NodeTransformer):
    def __init__(self, module: str, package: str) -> None:
        self._module, self._package = module, package

    def visit_Import(self, node: ast.Import) -> ast.AST:
        # `import torch.x` binds torch. Chains of names that begin with it are redirected in `visit_Attribute`.
        for alias in node.names:
            if alias.asname:
                alias.name = _redirect(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), self._package)
        return [
            ast.copy_location(ast.ImportFrom(_redirect(source, alias.name), [alias], 0), node)
            for alias in node.names
        ]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        is_enum = any(isinstance(base, ast.Name) and base.id == "Enum" for base in node.bases)
        is_at_top = node.col_offset == 0
        if is_at_top and (is_enum or node.name in _SHARED_CLASSES):
            return ast.copy_location(ast.ImportFrom(self._module, [ast.alias(node.name)], 0), node)
        if is_at_top and node.name in _DERIVED_CLASSES:
            return self._derive(node)
        return self.generic_visit(node)

    def _derive(self, node: ast.ClassDef) -> ast.AST:
        """Derive the class from torch's, and make its calls of `super()` skip the methods of torch's class."""
        module = f"__import__('importlib').import_module({self._module!r})"
        original = ast.parse(f"{module}.{node.name}", mode="eval").body
        node.bases = [original]
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call) == "super()":
                call.args = [original, ast.Name("self", ast.Load())]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        owner = ast.unparse(node.value) if isinstance(node.value, (ast.Attribute, ast.Name)) else ""
        if (
            not owner.startswith("torch.")
            or node.attr.startswith("_")
            or owner.removeprefix("torch.") not in copied_modules()
        ):
            return node
        if f"{owner}.{node.attr}".removeprefix("torch.") in copied_modules():  # a module in a longer chain
            return node
        call = ast.parse(f"__import__('importlib').import_module({_redirect(owner)!r})", mode="eval").body
        return ast.copy_location(ast.Attribute(call, node.attr, node.ctx), node)


def _redirect(module: str, name: str = "") -> str:
    """Return the module to import instead of torch's `module`, or for `name` in it, which may be a module too."""
    path = module.removeprefix("torch.")
    if path == module or path not in copied_modules():
        return module
    is_module = name and path in _WITH_MODULES and importlib.util.find_spec(f"{module}.{name}") is not None
    return module if is_module and f"{path}.{name}" not in copied_modules() else f"{ROOT}.{path}"

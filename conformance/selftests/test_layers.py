"""Allowed imports of files, read from their source: `impl` avoids what it re-implements, and there are no cycles."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.selftests.processes import ROOT
from conformance.strength.mutation.groups import source_files
from impl.tests.rewritten import ALLOWED, REWRITTEN, is_within


@dataclass(frozen=True)
class Layers:
    """Rows of a package's modules, by their names in it. The name of the package itself is empty.

    A module may import its own row and the rows above it. If `is_strict`, it may import its own folder and the rows
    above its own.
    """

    package: str
    rows: tuple[tuple[str, ...], ...]
    is_strict: bool = False

    def row_of(self, module: str) -> int:
        name = module.removeprefix(self.package).removeprefix(".")
        matches = [index for index, names in enumerate(self.rows) if is_within(name, names)]
        assert matches, f"{module} has no row in the layers of {self.package}"
        return matches[0]

    def wrong_imports(self, module: str, imports: Iterable[str]) -> list[str]:
        """Return the imports from the package that do not come from an allowed row."""
        row, folder = self.row_of(module), ".".join(module.split(".")[: self.package.count(".") + 2])
        least = row if self.is_strict else row + 1
        return sorted(
            name
            for name in imports
            if is_within(name, (self.package,))
            and self.row_of(name) >= least
            and not (self.is_strict and is_within(name, (folder,)))
        )


IMPL = Layers(
    "impl",
    (
        ("", "_after_dynamo", "_names", "_patching"),
        ("kernels",),
        ("optim",),
        ("amp", "nn"),
        ("distributed",),
        ("cpu", "cuda"),
        ("dynamo",),
        ("drop_in",),
    ),
)
SHARDING = Layers(
    "impl.distributed.fsdp",
    (
        ("_flat_param", "api"),
        ("_comm",),
        ("_params",),
        ("_layout", "wrap"),
        ("_engine",),
        ("_fsdp1", "_fully_shard"),
        ("_state_dict",),
        ("fully_shard", "fully_sharded_data_parallel", "sharded_grad_scaler"),
        ("_common_utils", "_param_precisions", "checkpoint"),
        ("",),
    ),
    is_strict=True,
)
# `conformance` itself registers packages by name.
SUITE = Layers(
    "conformance",
    (
        ("", "judge"),
        ("simulator", "exact_copy"),
        ("ranks",),
        ("amp", "cpu", "cuda", "distributed", "dynamo", "nn", "strategies", "training", "test_surface"),
        (
            "strength.faults",
            "strength.fork",
            "strength.mutation",
            "strength.order",
            "strength.pytest_run",
            "strength.results",
            "strength.worker",
        ),
        ("clients", "report"),
        ("cli", "catalogue", "plugin", "selection"),
        ("__main__", "conftest", "gpu", "strength", "subjects"),
        ("selftests",),
    ),
)

# By module: an objection, and why it is allowed. A line that nothing needs any more fails.
_ADDRESS = "the tracer, the export verifier and a later pass compare graph targets by identity; never called"
_OPTIONAL = "Triton is optional, and slow to import"
_AT_RUN_TIME = "asks torch for a name known at run time"
EXCEPTIONS = {
    "impl.amp._tracing": {
        "names torch.amp._enter_autocast": _ADDRESS,
        "names torch.amp._exit_autocast": _ADDRESS,
        "imports impl.dynamo.autocast by name": "Dynamo takes two seconds to import and calls this",
    },
    "impl.amp.autocast_mode": {_AT_RUN_TIME: "the module of a privateuse1 backend"},
    "impl.distributed.fsdp": {"imports impl.dynamo.fsdp by name": "as soon as somebody has imported Dynamo"},
    "impl.distributed.fsdp._comm.desync.entered_collectives": {
        _AT_RUN_TIME: "the dtype that another rank names"
    },
    "impl.distributed.fsdp.checkpoint.reading": {_AT_RUN_TIME: "the dtype that a pickle names"},
    "impl.dynamo._installing": {
        "names torch._dynamo.variables.builder.OptimizerVariable": "to replace it",
    },
    "impl.dynamo.captured": {
        "names torch._dynamo.variables.optimizer.OptimizerVariable": (
            "Dynamo's own tracker traces captured optimizers unless `impl.dynamo` is installed"
        ),
    },
    "impl.kernels._dispatch": {"imports impl.kernels._triton.scale in a function": _OPTIONAL},
    "impl.kernels.checked_norm": {"imports impl.kernels._triton.norm in a function": _OPTIONAL},
    "impl.kernels.clamp": {"imports impl.kernels._triton.clamp in a function": _OPTIONAL},
    "impl.kernels.fused_step": {"imports impl.kernels._triton.fused_step in a function": _OPTIONAL},
    "impl.kernels.norm": {"imports impl.kernels._triton.norm in a function": _OPTIONAL},
    "impl.kernels.scale": {"imports impl.kernels._triton.scale in a function": _OPTIONAL},
    "impl.kernels.unscale": {"imports impl.kernels._triton.unscale in a function": _OPTIONAL},
    "impl.nn.utils._dtensors": {
        "imports impl.nn.utils._dtensor_norm in a function": (
            "DTensor takes half a second to import, and a DTensor exists by then"
        ),
    },
    "impl.optim.captured": {"imports impl.dynamo.captured by name": "as soon as Dynamo is imported"},
}
# This module names what it replaces. Its callers and imports are checked like those of other modules.
NAMES_WHAT_IS_REWRITTEN = "impl.drop_in"


def is_rewritten(path: str) -> bool:
    """Return whether a dotted path is in a rewritten module, or names an object that comes from one."""
    if is_within(path, ALLOWED):
        return False
    if is_within(path, REWRITTEN):
        return True
    home = getattr(torch_object(path), "__module__", None)
    return isinstance(home, str) and is_within(home, REWRITTEN) and not is_within(home, ALLOWED)


@functools.cache
def torch_object(path: str) -> Any:
    current: Any = torch
    for name in path.split(".")[1:] if is_within(path, ("torch",)) else ():
        # A module that is not loaded has no objects; its path alone was judged.
        current = getattr(current, name, None) if isinstance(current, types.ModuleType) else None
    return current


class ImportReader(ast.NodeVisitor):
    """Reads one module, for every way in which it might reach what it must not."""

    def __init__(self, name: str, is_package: bool, modules: Collection[str]) -> None:
        self.objections: list[str] = []
        self._name = name
        self._package = name if is_package else name.rpartition(".")[0]
        self._modules = modules
        self._alias: dict[str, str] = {}
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._imported(name.name, name.name)
            self._alias[name.asname or name.name.partition(".")[0]] = (
                name.name if name.asname else name.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = absolute(node, self._package)
        for name in node.names:
            path = f"{source}.{name.name}"
            self._imported(path, source)
            self._alias[name.asname or name.name] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        else:
            self._named(path)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self._alias:
            self._named(self._alias[node.id])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.replace(".", "_").isidentifier() and "." in node.value:
            if node.value in self._modules:
                if IMPL.wrong_imports(self._name, [node.value]):
                    self._object_to(f"imports {node.value} by name")
            else:
                self._named(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else None
        if called in ("getattr", "vars", "hasattr") and node.args:
            base = self._path(node.args[0])
            if (
                base is not None
                and isinstance(torch_object(base), types.ModuleType)
                and base.startswith("torch")
            ):
                name = node.args[1] if len(node.args) > 1 else None
                if isinstance(name, ast.Constant):
                    self._named(f"{base}.{name.value}")
                else:
                    self._object_to(f"asks {base} for a name known at run time")
        self.generic_visit(node)

    def _path(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return self._alias.get(node.id) if isinstance(node, ast.Name) else None

    def _imported(self, path: str, source: str) -> None:
        if self._functions:
            self._object_to(f"imports {source} in a function")
        top = path.partition(".")[0]
        if top not in ("impl", "torch", "triton") and top not in sys.stdlib_module_names:
            self._object_to(f"imports {top}, which users need not have")
        self._named(path)

    def _named(self, path: str) -> None:
        if is_rewritten(path) and self._name != NAMES_WHAT_IS_REWRITTEN:
            self._object_to(f"names {path}")

    def _object_to(self, objection: str) -> None:
        if objection not in self.objections:
            self.objections.append(objection)


def absolute(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def objections_to(name: str, source: str, modules: Collection[str], is_package: bool = False) -> list[str]:
    """Return the violations of a source in `impl`, which are not allowed unless they are in `EXCEPTIONS`."""
    reader = ImportReader(name, is_package, modules)
    reader.visit(ast.parse(source))
    return reader.objections


def by_module(files: Iterable[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports_of(package: str, source: str, modules: Collection[str]) -> set[str]:
    """Return the members of `modules` that a source in `package` imports, also in functions and for type checkers."""
    imported_modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported_modules.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, package)
            paths = [f"{origin}.{name.name}" for name in node.names]
            imported_modules.update(path if path in modules else origin for path in paths)
    return imported_modules.intersection(modules)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the one before it, and the first the last. Empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter({name: named - {name} for name, named in graph.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return what each file imports of the others, also in tests, in functions, and for type checkers."""
    files = by_module(
        file
        for folder in ("impl", "conformance", "benchmarks", "ci")
        for file in (ROOT / folder).rglob("*.py")
    )
    assert {"impl.kernels", "impl.kernels.norm", "conformance.selftests.test_layers"} <= files.keys()
    return {
        name: imports_of(
            name if file.name == "__init__.py" else name.rpartition(".")[0],
            file.read_text(encoding="utf-8"),
            files.keys(),
        )
        for name, file in files.items()
    }


def test_imports_have_no_cycle() -> None:
    assert circle_in(import_graph()) == []


@pytest.mark.parametrize("layers", [IMPL, SHARDING, SUITE], ids=lambda layers: layers.package)
def test_imports_point_one_way(layers: Layers) -> None:
    modules = [
        name
        for name in import_graph()
        if is_within(name, (layers.package,)) and "tests" not in name.split(".")
    ]
    assert len(modules) > 50
    wrong = {name: layers.wrong_imports(name, import_graph()[name]) for name in modules}
    assert {name: imports for name, imports in wrong.items() if imports} == {}


@pytest.mark.parametrize(
    ("layers", "module", "imported", "is_wrong"),
    [
        (IMPL, "kernels.norm", "amp", True),
        (IMPL, "dynamo.autocast", "kernels", False),
        (SHARDING, "_comm.collectives", "_engine.unit", True),
        (SHARDING, "_engine.order", "_engine.streams", False),
        (SHARDING, "_fsdp1.wrapper", "_fully_shard.init", True),
        (SUITE, "judge.library", "judge.files.claims", False),
        (SUITE, "judge.library", "strength.faults.handmade", True),
    ],
)
def test_import_from_wrong_row_is_detected(
    layers: Layers, module: str, imported: str, is_wrong: bool
) -> None:
    path = f"{layers.package}.{imported}"
    wrong_imports = layers.wrong_imports(f"{layers.package}.{module}", [path, "torch"])
    assert wrong_imports == ([path] if is_wrong else [])


@pytest.mark.parametrize(
    "source",
    ["import p.a", "from p import a", "from . import a", "from .a import A", "def f():\n    import p.a"],
)
def test_import_cycle_is_detected(source: str) -> None:
    first, other = "if TYPE_CHECKING:\n    from p.b import B", source
    graph = {"p": set(), "p.a": imports_of("p", first, {"p", "p.a", "p.b"})}
    assert circle_in(graph | {"p.b": imports_of("p", other, {"p", "p.a", "p.b"})}) == ["p.a", "p.b", "p.a"]
    assert circle_in(graph | {"p.b": set()}) == []


def test_nothing_reaches_what_impl_rewrites() -> None:
    files = by_module(source_files("impl"))
    objections = {
        (name, objection)
        for name, file in files.items()
        for objection in objections_to(
            name, file.read_text(encoding="utf-8"), files.keys(), file.name == "__init__.py"
        )
    }
    allowed = {(name, objection) for name, reasons in EXCEPTIONS.items() for objection in reasons}
    assert sorted(objections - allowed) == []
    assert sorted(allowed - objections) == [], "exceptions that nothing needs any more"


FORBIDDEN = {
    "import torch.amp": "names torch.amp",
    "import torch.amp.grad_scaler as scaling": "names torch.amp.grad_scaler",
    "from torch.amp import GradScaler": "names torch.amp.GradScaler",
    "from torch import amp": "names torch.amp",
    "from torch import autocast": "names torch.autocast",
    "from torch.nn.utils import clip_grad_norm_ as clip": "names torch.nn.utils.clip_grad_norm_",
    "from torch.distributed.fsdp import FlatParameter": "names torch.distributed.fsdp.FlatParameter",
    "import torch\nwith torch.autocast('cpu'): pass": "names torch.autocast",
    "import torch\nx = torch.GradScaler()": "names torch.GradScaler",
    "import torch as t\nt.nn.utils.get_total_norm([])": "names torch.nn.utils.get_total_norm",
    "from torch import nn\nnn.utils.clip_grad_value_([], 1.0)": "names torch.nn.utils.clip_grad_value_",
    "import torch\ngetattr(torch, 'amp')": "names torch.amp",
    "import torch\nname = 'a' + 'mp'\ngetattr(torch, name)": "asks torch for a name known at run time",
    "import torch\nvars(torch)['amp']": "asks torch for a name known at run time",
    "import importlib\nimportlib.import_module('torch.amp.grad_scaler')": "names torch.amp.grad_scaler",
    "import sys\nsys.modules['torch.distributed.utils']": "names torch.distributed.utils",
    "import importlib\nimportlib.import_module('impl.amp')": "imports impl.amp by name",
    "def f():\n    import math": "imports math in a function",
    "def f():\n    from impl.amp import GradScaler": "imports impl.amp in a function",
    "import numpy": "imports numpy, which users need not have",
}


@pytest.mark.parametrize("source", list(FORBIDDEN))
def test_reader_reports_violations(source: str) -> None:
    assert FORBIDDEN[source] in objections_to("impl.kernels.norm", source, {"impl.amp"})


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.utils.parametrize.register_parametrization",
        "from torch.distributed.fsdp.api import ShardingStrategy",
        "import torch\ntorch.cuda.is_available()\ngetattr(torch, 'cuda')",
        "raise ValueError('use torch.amp.GradScaler(device) instead')",
    ],
)
def test_reader_accepts_allowed_imports(source: str) -> None:
    assert objections_to("impl.kernels.norm", source, set()) == []

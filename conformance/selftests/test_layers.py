"""Allowed imports of files, read from their source: `impl` avoids what it re-implements, and there are no cycles."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.strength.mutation.groups import source_files
from impl.tests.rewritten import ALLOWED, REWRITTEN, is_within

ROOT = Path(__file__).parents[2]

# Each layer may import itself and the layers above it in this list. The package's own __init__ is empty.
LAYERS = (
    ("impl._after_dynamo", "impl._patching"),
    ("impl.kernels",),
    ("impl.optim",),
    ("impl.amp", "impl.nn"),
    ("impl.distributed",),
    ("impl.cpu", "impl.cuda"),
    ("impl.dynamo",),
    ("impl.drop_in",),
)

# Inside this package a module may import its own folder and the rows above its own, and nothing else of the package.
SHARDING = "impl.distributed.fsdp"
WITHIN_SHARDING = (
    ("_flat_param", "api"),
    ("_comm",),
    ("_params",),
    ("_layout", "wrap"),
    ("_engine",),
    ("_fsdp1", "_fully_shard"),
    ("_state_dict",),
    ("fully_shard", "fully_sharded_data_parallel", "sharded_grad_scaler"),
    ("_common_utils", "_param_precisions", "checkpoint"),
)

# The same for the suite. `conformance` itself registers packages by name and comes before all rows.
SUITE = (
    ("judge",),
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
)

# (module, what it does): why it may. A line that nothing needs any more fails.
_ADDRESS = "the tracer, the export verifier and a later pass compare graph targets by identity; never called"
_OPTIONAL = "Triton is optional, and slow to import"
EXCEPTIONS = {
    ("impl.amp._tracing", "names torch.amp._enter_autocast"): _ADDRESS,
    ("impl.amp._tracing", "names torch.amp._exit_autocast"): _ADDRESS,
    (
        "impl.amp._tracing",
        "imports impl.dynamo.autocast by name",
    ): "Dynamo takes two seconds to import and calls this",
    (
        "impl.distributed.fsdp",
        "imports impl.dynamo.fsdp by name",
    ): "as soon as somebody has imported Dynamo",
    (
        "impl.optim.captured",
        "imports impl.dynamo.captured by name",
    ): "as soon as Dynamo is imported",
    (
        "impl.amp.autocast_mode",
        "asks torch for a name known at run time",
    ): "the module of a privateuse1 backend",
    (
        "impl.dynamo._installing",
        "names torch._dynamo.variables.builder.OptimizerVariable",
    ): "to replace it",
    (
        "impl.dynamo.captured",
        "names torch._dynamo.variables.optimizer.OptimizerVariable",
    ): "Dynamo's own tracker traces captured optimizers unless `impl.dynamo` is installed",
    (
        "impl.distributed.fsdp.checkpoint.reading",
        "asks torch for a name known at run time",
    ): "the dtype that a pickle names",
    (
        "impl.distributed.fsdp._comm.desync.entered_collectives",
        "asks torch for a name known at run time",
    ): "the dtype that another rank names",
    (
        "impl.nn.utils._dtensors",
        "imports impl.nn.utils._dtensor_norm in a function",
    ): "DTensor takes half a second to import, and a DTensor exists by then",
    ("impl.kernels._dispatch", "imports impl.kernels._triton.scale in a function"): _OPTIONAL,
    ("impl.kernels.checked_norm", "imports impl.kernels._triton.norm in a function"): _OPTIONAL,
    ("impl.kernels.clamp", "imports impl.kernels._triton.clamp in a function"): _OPTIONAL,
    ("impl.kernels.fused_step", "imports impl.kernels._triton.fused_step in a function"): _OPTIONAL,
    ("impl.kernels.norm", "imports impl.kernels._triton.norm in a function"): _OPTIONAL,
    ("impl.kernels.scale", "imports impl.kernels._triton.scale in a function"): _OPTIONAL,
    ("impl.kernels.unscale", "imports impl.kernels._triton.unscale in a function"): _OPTIONAL,
}
# This module names what it replaces. Its callers and imports are checked like those of other modules.
NAMES_WHAT_IS_REWRITTEN = "impl.drop_in"


@dataclass
class Reading:
    """Imports of a module, and its violations of other rules."""

    name: str
    imports: set[str] = field(default_factory=set)  # modules of this project
    annotated_by: set[str] = field(default_factory=set)  # imported for type checkers only
    objections: list[str] = field(default_factory=list)


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
    """Reads one module: its imports, and every way in which it might reach what it must not."""

    def __init__(self, name: str, is_package: bool, modules: set[str]) -> None:
        self.reading = Reading(name)
        self._package = name if is_package else name.rpartition(".")[0]
        self._modules = modules
        self._alias: dict[str, str] = {}
        self._functions = 0
        self._for_types = False

    def visit_If(self, node: ast.If) -> None:
        self._for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body:
            self.visit(statement)
        self._for_types = False
        for part in (node.test, *node.orelse):
            self.visit(part)

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
            self._imported(
                path if path in self._modules or not is_within(source, ("impl",)) else source, source
            )
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
                if layer_of(node.value) > layer_of(self.reading.name):
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
        if top == "impl":
            (self.reading.annotated_by if self._for_types else self.reading.imports).add(path)
        elif top not in ("torch", "triton") and top not in sys.stdlib_module_names:
            self._object_to(f"imports {top}, which users need not have")
        self._named(path)

    def _named(self, path: str) -> None:
        if is_rewritten(path) and self.reading.name != NAMES_WHAT_IS_REWRITTEN:
            self._object_to(f"names {path}")

    def _object_to(self, objection: str) -> None:
        if objection not in self.reading.objections:
            self.reading.objections.append(objection)


def absolute(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def read(name: str, source: str, modules: set[str], is_package: bool = False) -> Reading:
    reader = ImportReader(name, is_package, modules)
    reader.visit(ast.parse(source))
    return reader.reading


@functools.cache
def readings() -> list[Reading]:
    files = by_module(source_files("impl"))
    return [
        read(name, file.read_text(encoding="utf-8"), set(files), file.name == "__init__.py")
        for name, file in files.items()
    ]


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
    """Modules each of which imports the one before it, and the first the last; empty if there is no circle."""
    try:
        graphlib.TopologicalSorter({name: named - {name} for name, named in graph.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def layer_of(module: str) -> int:
    return next(index for index, packages in enumerate(LAYERS) if is_within(module, packages))


def row_of(module: str) -> int:
    """Return a module's row in `WITHIN_SHARDING`. The package itself, which only re-exports, comes after all rows."""
    rows = [tuple(f"{SHARDING}.{name}" for name in names) for names in WITHIN_SHARDING]
    matches = [index for index, names in enumerate(rows) if is_within(module, names)]
    assert matches or module == SHARDING, f"{module} has no row in WITHIN_SHARDING"
    return matches[0] if matches else len(rows)


def out_of_order(reading: Reading) -> list[str]:
    """Imports within the sharding package that do not come from a row above; one within a folder is free."""
    named = {name for name in reading.imports | reading.annotated_by if is_within(name, (SHARDING,))}
    folder = ".".join(reading.name.split(".")[:4])
    return sorted(
        name for name in named if row_of(name) >= row_of(reading.name) and not is_within(name, (folder,))
    )


def upward(reading: Reading) -> list[str]:
    named = reading.imports | reading.annotated_by
    return sorted(name for name in named if layer_of(name) > layer_of(reading.name))


def test_every_module_has_its_layer() -> None:
    assert len(readings()) > 10
    for reading in readings():
        # The packages above the layers only say what they mirror.
        assert reading.name == "impl" or layer_of(reading.name) >= 0


def test_imports_point_one_way() -> None:
    assert {reading.name: upward(reading) for reading in readings() if upward(reading)} == {}


def test_sharding_is_in_order() -> None:
    within = [reading for reading in readings() if is_within(reading.name, (SHARDING,))]
    assert len(within) > 10
    assert {reading.name: out_of_order(reading) for reading in within if out_of_order(reading)} == {}


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


def suite_row_of(module: str) -> int:
    """Return a module's row in `SUITE`, or -1 for the package itself."""
    rows = [tuple(f"conformance.{name}" for name in names) for names in SUITE]
    matches = [index for index, names in enumerate(rows) if is_within(module, names)]
    assert matches or module == "conformance", f"{module} has no row in SUITE"
    return matches[0] if matches else -1


def upward_in_suite(module: str, imports: Iterable[str]) -> list[str]:
    suite = {name for name in imports if is_within(name, ("conformance",))}
    return sorted(name for name in suite if suite_row_of(name) > suite_row_of(module))


def test_suite_imports_point_one_way() -> None:
    modules = {name: names for name, names in import_graph().items() if name.startswith("conformance.")}
    assert len(modules) > 100
    upward_imports = {name: upward_in_suite(name, names) for name, names in modules.items()}
    assert {name: names for name, names in upward_imports.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "imported", "is_upward"),
    [
        ("judge.library", "judge.files.claims", False),
        ("judge.library", "strength.faults.handmade", True),
        ("judge.sandbox.seeding", "simulator", True),
        ("ranks.pool", "simulator", False),
        ("report.verdict", "cli.terminal", True),
        ("plugin", "selftests", True),
    ],
)
def test_upward_import_in_suite_is_detected(module: str, imported: str, is_upward: bool) -> None:
    path = f"conformance.{imported}"
    assert upward_in_suite(f"conformance.{module}", {path, "impl.amp"}) == ([path] if is_upward else [])


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
    objections = {(reading.name, objection) for reading in readings() for objection in reading.objections}
    assert sorted(objections - EXCEPTIONS.keys()) == []
    assert sorted(EXCEPTIONS.keys() - objections) == [], "exceptions that nothing needs any more"


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
    assert FORBIDDEN[source] in read("impl.kernels.norm", source, {"impl.amp"}).objections


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
    assert read("impl.kernels.norm", source, set()).objections == []


def test_upward_import_is_detected() -> None:
    assert upward(read("impl.kernels.norm", "from impl.amp import GradScaler", {"impl.amp"})) == ["impl.amp"]
    for_types = "if TYPE_CHECKING:\n    from impl.amp import GradScaler"
    assert upward(read("impl.kernels.norm", for_types, {"impl.amp"})) == ["impl.amp"]
    assert upward(read("impl.dynamo.autocast", "from impl import kernels", {"impl.kernels"})) == []


@pytest.mark.parametrize(
    ("module", "imported", "is_out_of_order"),
    [
        ("_engine.unit", "_comm.collectives", False),
        ("_comm.collectives", "_engine.unit", True),
        ("_engine.order", "_engine.streams", False),
        ("_fsdp1.wrapper", "_fully_shard.init", True),
        ("_state_dict.full", "_state_dict.local", False),
        ("_state_dict.full", "_engine.root", False),
        ("_engine.root", "_state_dict.full", True),
        ("wrap", "fully_sharded_data_parallel", True),
    ],
)
def test_import_out_of_order_is_detected(module: str, imported: str, is_out_of_order: bool) -> None:
    path = f"{SHARDING}.{imported}"
    wrong_imports = out_of_order(read(f"{SHARDING}.{module}", f"import {path}", {path}))
    assert wrong_imports == ([path] if is_out_of_order else [])

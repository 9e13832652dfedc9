"""The suite's own modules import each other one way, whether by a statement, in a function or by name."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources() -> dict[str, str]:
    """Each module of the suite, by its name."""
    found = {}
    for file in sorted((ROOT / "conformance").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file.read_text(encoding="utf-8")
    return found


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: set(_named(source, modules)) - {name} for name, source in modules.items()}


def _named(source: str, modules: Mapping[str, str]) -> Iterator[str]:
    tree = ast.parse(source)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [path if path in modules else str(node.module) for path in paths]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value]  # what importlib or a fork server is told to import
        yield from (name for name in found if name in modules)


def test_no_cycles() -> None:
    modules = sources()
    assert {
        "conformance.judge.library",
        "conformance.faults",
        "conformance.faults.handmade",
    } <= modules.keys()
    order = list(graphlib.TopologicalSorter(imports(modules)).static_order())
    assert order.index("conformance.faults") < order.index("conformance.judge.library")


@pytest.mark.parametrize(
    "back",
    [
        "from a.door import Library",
        "from a import door",
        "import a.door",
        "def f():\n    from a.door import Library",
        "import importlib\nimportlib.import_module('a.door')",
    ],
)
def test_a_way_back_is_a_cycle(back: str) -> None:
    modules = {"a": "", "a.door": "from a.faults import find", "a.faults": back}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports(modules)).prepare()

"""Files of `impl` that name CUDA are listed in docs/recipes.md with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names_cuda(source: str) -> bool:
    tree = ast.parse(source)
    prose = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(value) for value in prose if isinstance(value, ast.Constant)}
    return any(_names_cuda(node) for node in ast.walk(tree) if id(node) not in docstrings)


def _names_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("cuda", "is_cuda")
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and re.search(r"\bcuda\b", node.value) is not None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.cuda.synchronize()", True),
        ("x.is_cuda", True),
        ("device = 'cuda'", True),
        ("places = ['cuda.amp.GradScaler']", True),
        ("def f():\n    '''On cuda.'''", False),
        ("import impl.cuda.amp", False),
        ("torch.accelerator.synchronize()", False),
    ],
)
def test_names_cuda_ignores_docstrings_and_imports(source: str, expected: bool) -> None:
    assert names_cuda(source) is expected


def test_each_file_that_names_cuda_has_its_reason() -> None:
    files = (path for path in (ROOT / "impl").rglob("*.py") if "tests" not in path.parts)
    naming = {str(path.relative_to(ROOT)) for path in files if names_cuda(path.read_text())}
    rows = re.findall(r"^\| `(impl/\S+\.py)` \| \S", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    assert naming == {*rows}

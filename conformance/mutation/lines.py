"""Lines that note that they run, in a file that all processes of a test share."""

from __future__ import annotations

import ast
import functools
import mmap
import os

import torch

from conformance.mutation.groups import GROUPS, file_of, modules_of

FILE = "CONFORMANCE_LINES"  # the environment variable that names the file: a byte for each line
_NAME = "_note_line"


def numbered(package: str) -> dict[str, range]:
    """The lines of each module that is mutated, counted through them all; a module's line 1 is the second of these."""
    first, found = 0, {}
    for group in GROUPS:
        for module in modules_of(group, package):
            count = len(file_of(package, module).read_text(encoding="utf-8").splitlines()) + 1
            found[module] = range(first, first + count)
            first += count
    return found


@torch.compiler.assume_constant_result  # whoever traces it calls it while tracing, and its graph does not break
def note(number: int) -> None:
    _noted()[number] = 1


@functools.cache
def _noted() -> mmap.mmap:
    with open(os.environ[FILE], "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def taken() -> list[int]:
    """The numbers of the lines that have run since it was asked before."""
    found = [number for number, ran in enumerate(_noted()[:]) if ran]
    _noted()[:] = bytes(len(_noted()))
    return found


def instrument(tree: ast.Module, first: int) -> None:
    """Have each statement of each function note where it begins, before it runs."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _of_itself(function):
                for block in ("body", "orelse", "finalbody"):
                    if isinstance(statements := getattr(node, block, None), list):
                        setattr(node, block, _noting(statements, first))
    top = next(
        place for place, node in enumerate(tree.body) if not (_is_docstring(node) or _is_of_future(node))
    )
    tree.body[top:top] = ast.parse(f"from {__name__} import {note.__name__} as {_NAME}").body
    ast.fix_missing_locations(tree)


def _noting(statements: list[ast.stmt], first: int) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in statements:
        if not _is_docstring(statement):
            found += ast.parse(f"{_NAME}({first + statement.lineno})").body
        found.append(statement)
    return found


def _of_itself(function: ast.AST) -> list[ast.AST]:
    """The function and what is in it, but for functions and classes within."""
    found, ahead = [], [function]
    while ahead:
        found.append(ahead.pop())
        inner = ast.iter_child_nodes(found[-1])
        ahead += [
            one
            for one in inner
            if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        ]
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_of_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"

"""Instrumentation of source, so that each executed line is recorded in a file that all processes of a test share."""

from __future__ import annotations

import ast
import functools
import mmap
import os

import torch

from conformance.strength.mutation.groups import GROUPS, file_of, modules_of

FILE = "CONFORMANCE_LINES"  # environment variable with the file's path
_NAME = "_note_line"


def numbered(package: str) -> dict[str, range]:
    """Return a range of numbers for the lines of each mutated module. Line n of a module has number `start` + n."""
    first, ranges = 0, {}
    for group in GROUPS:
        for module in modules_of(group, package):
            count = len(file_of(package, module).read_text(encoding="utf-8").splitlines()) + 1
            ranges[module] = range(first, first + count)
            first += count
    return ranges


# Dynamo calls this while it traces, instead of breaking the graph.
@torch.compiler.assume_constant_result
def note(number: int) -> None:
    _flags()[number] = 1


@functools.cache
def _flags() -> mmap.mmap:
    """Map the file, which has a byte for each line."""
    with open(os.environ[FILE], "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def take_executed() -> list[int]:
    """Return the numbers of the lines that were executed since the last call."""
    executed = [number for number, flag in enumerate(_flags()[:]) if flag]
    _flags()[:] = bytes(len(_flags()))
    return executed


def instrument(tree: ast.Module, first: int) -> None:
    """Insert a call of `note` with the line number before each statement of each function."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _own_nodes(function):
                for block in ("body", "orelse", "finalbody"):
                    if isinstance(statements := getattr(node, block, None), list):
                        setattr(node, block, _insert_notes(statements, first))
    top = next(
        place for place, node in enumerate(tree.body) if not (_is_docstring(node) or _is_of_future(node))
    )
    tree.body[top:top] = ast.parse(f"from {__name__} import {note.__name__} as {_NAME}").body
    ast.fix_missing_locations(tree)


def _insert_notes(statements: list[ast.stmt], first: int) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for statement in statements:
        if not _is_docstring(statement):
            result += ast.parse(f"{_NAME}({first + statement.lineno})").body
        result.append(statement)
    return result


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function without those of functions and classes inside it."""
    nodes, ahead = [], [function]
    while ahead:
        nodes.append(ahead.pop())
        ahead += [
            child
            for child in ast.iter_child_nodes(nodes[-1])
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        ]
    return nodes


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_of_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"

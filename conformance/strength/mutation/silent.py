"""Detection of code that only writes to a log or a terminal, which is not part of torch's behaviour."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Set

_LOGGERS = ("log", "logger", "logging")
_LOGS = ("torch._C._log_api_usage_once", "torch._logging.")
_PRINTS = ("print", "traceback.print_stack")
_GROWTH = ("add", "append", "extend")
_QUESTIONS = ("get_", "has_", "is_")  # prefixes of functions without side effects


def silent_in(tree: ast.AST) -> Set[ast.AST]:
    """Return docstrings, log calls, branches that only contain these, and statements whose results only these read.

    If the condition of such a branch calls functions that may have side effects, the branch is included without its
    condition.
    """
    nodes = list(ast.walk(tree))
    silent: Set[ast.AST] = {
        node
        for node in nodes
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_of_a_log(node.value))
    }
    read = set(_read(tree, lambda _: False))
    while True:
        names = read.difference(_read(tree, silent.__contains__))
        more = {node for node in nodes if _serves(node, silent, names)} - silent
        if not more:
            return silent
        silent = silent | more


def asks_others(expression: ast.expr) -> bool:
    """Return whether an expression calls a function that is neither a log nor without side effects by its name."""
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return any(not _is_of_a_log(call) and not _is_question(call) for call in calls)


def _is_question(call: ast.Call) -> bool:
    """Return whether a call only asks, such as `dist.get_rank()` or `_is_static(x)`."""
    return last_name(call.func).lstrip("_").startswith(_QUESTIONS)


def _serves(node: ast.AST, silent: Set[ast.AST], names: Set[str]) -> bool:
    """Return whether a node only contains silent nodes, or only assigns `names`, which only silent nodes read."""
    if isinstance(node, ast.If):
        return all(statement in silent for statement in (*node.body, *node.orelse))
    if isinstance(node, ast.Assign):
        is_read_so = all(isinstance(target, ast.Name) and target.id in names for target in node.targets)
        return is_read_so and not asks_others(node.value)
    return _grown_by(node) in names


def _grown_by(node: ast.AST) -> str:
    """Return the `a` of `a.append(b)` if `b` calls no function with side effects, else an empty string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not node.value.keywords:
        function = node.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return (
                function.value.id
                if function.attr in _GROWTH and not any(map(asks_others, node.value.args))
                else ""
            )
    return ""


def _read(node: ast.AST, is_left_out: Callable[[ast.AST], bool]) -> Iterator[str]:
    """Yield the names that are read, and names that other code can read: parameters, globals and nonlocals."""
    below = ast.iter_child_nodes(node)
    if is_left_out(node):
        below = iter([node.test] if isinstance(node, ast.If) and asks_others(node.test) else [])
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif _grown_by(node):
        below = iter(node.value.args)  # type: ignore[attr-defined]
    for child in below:
        yield from _read(child, is_left_out)


def _is_of_a_log(node: ast.AST) -> bool:
    """Return whether a node calls a logger, such as `self._perf_hint_log.debug`, or prints."""
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    called = ast.unparse(node.func)
    return name.rpartition("_")[2] in _LOGGERS or called.startswith(_LOGS) or called in _PRINTS


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression, such as `rank` of `a.b.rank` and of `rank`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

"""What in a source serves a log or a terminal alone: what stands there is no behaviour of torch's, nor whether."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Set

_LOGGERS = ("log", "logger", "logging")
_LOGS = ("torch._C._log_api_usage_once", "torch._logging.")
_PRINTS = ("print", "traceback.print_stack")
_GROWTH = ("add", "append", "extend")
_QUESTIONS = ("get_", "has_", "is_")  # what a call that only answers begins with


def silent_in(tree: ast.AST) -> Set[ast.AST]:
    """Docstrings, lines for a log, branches around these, and statements that make what only they read.

    A branch that calls more than questions to decide is in it, but for its test: that may do more than to answer.
    """
    silent: Set[ast.AST] = {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_of_a_log(node.value))
    }
    while True:
        read, aloud = set(_read(tree, lambda _: False)), set(_read(tree, silent.__contains__))
        more = {node for node in ast.walk(tree) if _serves(node, silent, read - aloud)} - silent
        if not more:
            return silent
        silent = silent | more


def asks_others(expression: ast.expr) -> bool:
    """Whether anything but a log or a question is called."""
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return any(not _is_of_a_log(call) and not _is_question(call) for call in calls)


def _is_question(call: ast.Call) -> bool:
    """Of `dist.get_rank()` and `_is_static(x)`."""
    return last_name(call.func).lstrip("_").startswith(_QUESTIONS)


def _serves(node: ast.AST, silent: Set[ast.AST], names: Set[str]) -> bool:
    """Whether it does nothing but what is silent, or makes one of these names, which nothing else reads."""
    if isinstance(node, ast.If):
        return all(statement in silent for statement in (*node.body, *node.orelse))
    if isinstance(node, ast.Assign):
        is_read_so = all(isinstance(each, ast.Name) and each.id in names for each in node.targets)
        return is_read_so and not asks_others(node.value)
    return _grown_by(node) in names


def _grown_by(node: ast.AST) -> str:
    """The `a` of `a.append(b)`, if nothing else is called there."""
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
    """Names whose values go somewhere, those of what callers gave and of what modules share among them."""
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
    """Whether it is a call of `logger.info`, of `self._perf_hint_log.debug`, or of what else writes or prints."""
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    called = ast.unparse(node.func)
    return name.rpartition("_")[2] in _LOGGERS or called.startswith(_LOGS) or called in _PRINTS


def last_name(node: ast.AST) -> str:
    """Of `a.b.rank` and of `rank` it is `rank`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

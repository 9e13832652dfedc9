"""Mutation operators on a syntax tree. Each makes a typical small mistake of programmers.

An operator gets a node and yields replacements, each of which is a mutant. Only the bodies of functions are mutated,
because the code that runs at import is the same for every test. Code that only writes to a log or a terminal is left
out, because it is not part of torch's behaviour.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

Operator = Callable[[ast.AST], Iterator[ast.AST]]
OPERATORS: dict[str, Operator] = {}
_WAITS = {"wait", "barrier", "wait_tensor"}
_DEVICE_WAITS = {"wait_stream", "wait_event", "synchronize", "record_stream"}
_OPPOSITES = {"max": "min", "any": "all", "MAX": "MIN", "maximum": "minimum", "amax": "amin", "SUM": "AVG"}
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_LOGGERS = ("log", "logger", "logging")
_LOGS = ("torch._C._log_api_usage_once", "torch._logging.")
_PRINTS = ("print", "traceback.print_stack")
_DTYPES = {"float32": "float64", "float64": "float32", "float16": "bfloat16", "bfloat16": "float16"}


def _operator(operator: Operator) -> Operator:
    OPERATORS[operator.__name__] = operator
    return operator


@_operator
def drop_statement(node: ast.AST) -> Iterator[ast.AST]:
    """Drop a call, an assignment to an attribute or an item, a deletion or a raise."""
    outlives = isinstance(node, ast.Assign) and not any(
        isinstance(target, ast.Name) for target in node.targets
    )
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if (
        outlives
        or isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise))
        or (called and not _is_call_of(node, _WAITS | _DEVICE_WAITS))
    ):
        yield ast.Pass()


@_operator
def drop_wait(node: ast.AST) -> Iterator[ast.AST]:
    """Drop a wait for a collective or the other ranks."""
    if _is_call_of(node, _WAITS):
        yield ast.Pass()


@_operator
def drop_device_wait(node: ast.AST) -> Iterator[ast.AST]:
    """Drop a wait for a stream, an event or all work of a device."""
    if _is_call_of(node, _DEVICE_WAITS):
        yield ast.Pass()


@_operator
def drop_argument(node: ast.AST) -> Iterator[ast.AST]:
    """Drop the last positional argument of a call, or a keyword argument."""
    if not isinstance(node, ast.Call):
        return
    if node.args:
        yield ast.Call(node.func, node.args[:-1], node.keywords)
    for left_out in node.keywords:
        if left_out.arg is not None:
            yield ast.Call(node.func, node.args, [other for other in node.keywords if other is not left_out])


@_operator
def negate_condition(node: ast.AST) -> Iterator[ast.AST]:
    """Negate the condition of a branch, a loop, an expression, a comprehension or an assertion."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        negated = copy.copy(node)
        negated.test = ast.UnaryOp(ast.Not(), node.test)
        yield negated
    if isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(
            node.target, node.iter, [ast.UnaryOp(ast.Not(), node.ifs[0]), *node.ifs[1:]], node.is_async
        )


@_operator
def swap_extremes(node: ast.AST) -> Iterator[ast.AST]:
    """Swap max and min, any and all, or sum and mean."""
    if isinstance(node, ast.Name) and node.id in _OPPOSITES:
        yield ast.Name(_OPPOSITES[node.id], node.ctx)
    if isinstance(node, ast.Attribute) and node.attr in _OPPOSITES:
        yield ast.Attribute(node.value, _OPPOSITES[node.attr], node.ctx)


@_operator
def swap_signs(node: ast.AST) -> Iterator[ast.AST]:
    """Swap + and -."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SIGNS:
        swapped = copy.copy(node)
        swapped.op = _SIGNS[type(node.op)]()
        yield swapped


@_operator
def swap_bounds(node: ast.AST) -> Iterator[ast.AST]:
    """Swap < and <=, or > and >=."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield ast.Compare(node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)


@_operator
def return_early(node: ast.AST) -> Iterator[ast.AST]:
    """Return from a function before one of its statements."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for position in range(1 if ast.get_docstring(node) else 0, len(node.body)):
            if isinstance(node.body[position], ast.Pass):
                continue
            early = copy.copy(node)
            early.body = [*node.body[:position], ast.copy_location(ast.Return(), node.body[position])]
            yield early


@_operator
def stale_value(node: ast.AST) -> Iterator[ast.AST]:
    """Drop an assignment of a new value that is computed from the old value of the same name, except by `cast`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        is_cast = isinstance(node.value, ast.Call) and _last_name(node.value.func) == "cast"
        is_used = any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node.value))
        if is_used and not is_cast:
            yield ast.Pass()


@_operator
def wrong_group(node: ast.AST) -> Iterator[ast.AST]:
    """Run a collective in the default group."""
    yield from _with_arguments(node, ("group", "_pg", "pg"), ast.Constant(None))


@_operator
def wrong_dtype(node: ast.AST) -> Iterator[ast.AST]:
    """Replace a named dtype by a similar one, or a dtype argument by float64."""
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES and _is_torch(node.value):
        yield ast.Attribute(node.value, _DTYPES[node.attr], node.ctx)
    yield from _with_arguments(node, ("dtype",), ast.parse("torch.float64", mode="eval").body)


@_operator
def wrong_rank(node: ast.AST) -> Iterator[ast.AST]:
    """Replace the rank by 0, or compare it with 1 instead of 0."""
    if _last_name(node) == "rank" and isinstance(getattr(node, "ctx", None), ast.Load):
        yield ast.Constant(0)
    if isinstance(node, ast.Compare) and "rank" in ast.unparse(node.left):
        compared = node.comparators[0]
        if isinstance(compared, ast.Constant) and compared.value == 0:
            yield ast.Compare(node.left, node.ops, [ast.Constant(1), *node.comparators[1:]])


def _is_call_of(node: ast.AST, names: Collection[str]) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _last_name(node.value.func) in names
    )


def _is_silent(node: ast.AST) -> bool:
    """Return whether a node is a docstring, a call that logs or prints, or a branch that only contains these."""
    if isinstance(node, ast.If):
        return all(map(_is_silent, (*node.body, *node.orelse)))
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_of_a_log(node.value))


def _is_of_a_log(node: ast.AST) -> bool:
    """Return whether a node calls a logger, such as `self._perf_hint_log.debug`, or prints."""
    if not isinstance(node, ast.Call):
        return False
    name = _last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    called = ast.unparse(node.func)
    return name.rpartition("_")[2] in _LOGGERS or called.startswith(_LOGS) or called in _PRINTS


def _last_name(node: ast.AST) -> str:
    """Return the last name of an expression, such as `rank` of `a.b.rank` and of `rank`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _with_arguments(node: ast.AST, ends: tuple[str, ...], other: ast.expr) -> Iterator[ast.AST]:
    """Yield copies of a call in which one argument whose name has such an end is replaced by `other`."""
    if not isinstance(node, ast.Call):
        return
    for position, argument in enumerate(node.args):
        if _last_name(argument).endswith(ends):
            args = [*node.args[:position], other, *node.args[position + 1 :]]
            yield ast.Call(node.func, args, node.keywords)
    for position, keyword in enumerate(node.keywords):
        if _last_name(keyword.value).endswith(ends):
            keywords = [*node.keywords]
            keywords[position] = ast.keyword(keyword.arg, other)
            yield ast.Call(node.func, node.args, keywords)


@dataclass(frozen=True)
class MutationSite:
    """A mutant of a module."""

    operator: str
    number: int  # index among the operator's mutants of the module
    function: str  # qualified name of the innermost function
    line: int  # first line of the innermost statement


def sites(tree: ast.Module) -> list[MutationSite]:
    return [site for site, _, _ in mutants(tree)]


def mutate(tree: ast.Module, operator: str, number: int) -> MutationSite:
    """Change the tree into a mutant.

    Raises:
        LookupError: the module has no such mutant.
    """
    for site, node, other in mutants(tree):
        if (site.operator, site.number) == (operator, number):
            replace_node(tree, node, ast.copy_location(other, node))
            ast.fix_missing_locations(tree)
            return site
    raise LookupError(f"there is no mutant {number} of {operator!r} in this source")


def replace_node(tree: ast.Module, node: ast.AST, other: ast.AST) -> None:
    _Replacement(node, other).visit(tree)


def mutants(tree: ast.Module) -> Iterator[tuple[MutationSite, ast.AST, ast.AST]]:
    """Yield each mutant as its site, the node of the tree that it changes, and the node that replaces it."""
    counted = dict.fromkeys(OPERATORS, 0)
    for node, function, line in _nodes(tree):
        for name, operator in OPERATORS.items():
            for other in operator(node):
                begins = other.body[-1].lineno if name == "return_early" else line  # type: ignore[attr-defined]
                yield MutationSite(name, counted[name], function, begins), node, other
                counted[name] += 1


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield the nodes that run when a function is called, each with the function's name and its statement's line."""

    def below(
        node: ast.AST, path: tuple[str, ...], function: str, line: int
    ) -> Iterator[tuple[ast.AST, str, int]]:
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                yield from below(child, (*path, node.name), function, line)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = ".".join((*path, node.name))
            yield node, name, node.lineno
            for child in node.body:
                yield from below(child, (*path, node.name), name, line)
        elif not _is_silent(node):
            line = node.lineno if isinstance(node, ast.stmt) else line
            if function:
                yield node, function, line
            for child in _evaluated_children(node):
                yield from below(child, path, function, line)

    for statement in tree.body:
        yield from below(statement, (), "", 0)


def _evaluated_children(node: ast.AST) -> Iterator[ast.AST]:
    """Return the children of a node without annotations, which are not evaluated."""
    left_out = getattr(node, "annotation", None)
    return (child for child in ast.iter_child_nodes(node) if child is not left_out)


class _Replacement(ast.NodeTransformer):
    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self._node, self._other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        return self._other if node is self._node else self.generic_visit(node)

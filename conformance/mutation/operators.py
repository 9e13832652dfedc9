"""Mutation operators on a syntax tree: each is a small mistake that a programmer makes.

An operator is asked about one node and yields what may stand in its place, one mutant each. Only the bodies of
functions are mutated: what runs at import is the same for every test.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conformance.mutation.silent import asks_others, last_name, silent_in

Operator = Callable[[ast.AST], Iterator[ast.AST]]
OPERATORS: dict[str, Operator] = {}
_WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "record_stream", "barrier", "wait_tensor"}
_OPPOSITES = {"max": "min", "any": "all", "MAX": "MIN", "maximum": "minimum", "amax": "amin", "SUM": "AVG"}
_OPPOSITES |= {other: one for one, other in _OPPOSITES.items()}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_DTYPES = {"float32": "float64", "float64": "float32", "float16": "bfloat16", "bfloat16": "float16"}


def _operator(operator: Operator) -> Operator:
    OPERATORS[operator.__name__] = operator
    return operator


@_operator
def drop_statement(node: ast.AST) -> Iterator[ast.AST]:
    """A call, an assignment to what outlives the function, a deletion or a raise is left out."""
    outlives = isinstance(node, ast.Assign) and not any(isinstance(one, ast.Name) for one in node.targets)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if (
        outlives
        or isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise))
        or (called and not _is_wait(node))
    ):
        yield ast.Pass()


@_operator
def drop_wait(node: ast.AST) -> Iterator[ast.AST]:
    """Nothing waits for a stream, an event, a collective or the other ranks."""
    if _is_wait(node):
        yield ast.Pass()


@_operator
def drop_argument(node: ast.AST) -> Iterator[ast.AST]:
    """A call loses its last argument by position, or one by keyword."""
    if not isinstance(node, ast.Call):
        return
    if node.args:
        yield ast.Call(node.func, node.args[:-1], node.keywords)
    for left_out in node.keywords:
        if left_out.arg is not None:
            yield ast.Call(node.func, node.args, [one for one in node.keywords if one is not left_out])


@_operator
def negate_condition(node: ast.AST) -> Iterator[ast.AST]:
    """A branch, a loop, a condition in an expression or an assertion goes the other way."""
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
    """max for min, any for all, a sum for a mean, and the other way round."""
    if isinstance(node, ast.Name) and node.id in _OPPOSITES:
        yield ast.Name(_OPPOSITES[node.id], node.ctx)
    if isinstance(node, ast.Attribute) and node.attr in _OPPOSITES:
        yield ast.Attribute(node.value, _OPPOSITES[node.attr], node.ctx)


@_operator
def swap_signs(node: ast.AST) -> Iterator[ast.AST]:
    """+ for -, and the other way round."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SIGNS:
        swapped = copy.copy(node)
        swapped.op = _SIGNS[type(node.op)]()
        yield swapped


@_operator
def swap_bounds(node: ast.AST) -> Iterator[ast.AST]:
    """< for <=, > for >=, and the other way round."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield ast.Compare(node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)


@_operator
def return_early(node: ast.AST) -> Iterator[ast.AST]:
    """A function ends before one of its statements that does something."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for position in range(1 if ast.get_docstring(node) else 0, len(node.body)):
            if isinstance(node.body[position], ast.Pass):
                continue
            early = copy.copy(node)
            early.body = [*node.body[:position], ast.copy_location(ast.Return(), node.body[position])]
            yield early


@_operator
def stale_value(node: ast.AST) -> Iterator[ast.AST]:
    """A name keeps its value where it is given a new one that is made of it; `cast` makes none."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        is_cast = isinstance(node.value, ast.Call) and last_name(node.value.func) == "cast"
        if not is_cast and any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node.value)):
            yield ast.Pass()


@_operator
def wrong_group(node: ast.AST) -> Iterator[ast.AST]:
    """A collective runs in the default group."""
    yield from _with_arguments(node, ("group", "_pg", "pg"), ast.Constant(None))


@_operator
def wrong_dtype(node: ast.AST) -> Iterator[ast.AST]:
    """A dtype by name is its neighbour, one that is handed over is float64."""
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES and _is_torch(node.value):
        yield ast.Attribute(node.value, _DTYPES[node.attr], node.ctx)
    yield from _with_arguments(node, ("dtype",), ast.parse("torch.float64", mode="eval").body)


@_operator
def wrong_rank(node: ast.AST) -> Iterator[ast.AST]:
    """Every rank takes itself for the first, or another one for it."""
    if last_name(node) == "rank" and isinstance(getattr(node, "ctx", None), ast.Load):
        yield ast.Constant(0)
    if isinstance(node, ast.Compare) and "rank" in ast.unparse(node.left):
        compared = node.comparators[0]
        if isinstance(compared, ast.Constant) and compared.value == 0:
            yield ast.Compare(node.left, node.ops, [ast.Constant(1), *node.comparators[1:]])


def _is_wait(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and last_name(node.value.func) in _WAITS
    )


def _is_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _with_arguments(node: ast.AST, ends: tuple[str, ...], other: ast.expr) -> Iterator[ast.AST]:
    """The call with `other` in the place of each argument whose name ends so."""
    if not isinstance(node, ast.Call):
        return
    for position, given in enumerate(node.args):
        if last_name(given).endswith(ends):
            args = [*node.args[:position], other, *node.args[position + 1 :]]
            yield ast.Call(node.func, args, node.keywords)
    for position, keyword in enumerate(node.keywords):
        if last_name(keyword.value).endswith(ends):
            keywords = [*node.keywords]
            keywords[position] = ast.keyword(keyword.arg, other)
            yield ast.Call(node.func, node.args, keywords)


@dataclass(frozen=True)
class MutationSite:
    """One mutant of a module."""

    operator: str
    number: int  # among this operator's in the module
    function: str  # the innermost function or method around it, by its qualified name
    line: int  # where the innermost statement around it begins


def sites(tree: ast.Module) -> list[MutationSite]:
    return [site for site, _, _ in _mutants(tree)]


def mutate(tree: ast.Module, operator: str, number: int) -> MutationSite:
    """Make one mistake in the tree.

    Raises:
        LookupError: the module has no such mutant.
    """
    for site, node, other in _mutants(tree):
        if (site.operator, site.number) == (operator, number):
            _Replaced(node, ast.copy_location(other, node)).visit(tree)
            ast.fix_missing_locations(tree)
            return site
    raise LookupError(f"there is no mutant {number} of {operator!r} in this source")


def _mutants(tree: ast.Module) -> Iterator[tuple[MutationSite, ast.AST, ast.AST]]:
    counted = dict.fromkeys(OPERATORS, 0)
    for node, function, line in _nodes(tree):
        for name, operator in OPERATORS.items():
            for other in operator(node):
                begins = other.body[-1].lineno if name == "return_early" else line  # type: ignore[attr-defined]
                yield MutationSite(name, counted[name], function, begins), node, other
                counted[name] += 1


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """What runs when a function is called: each node, the function's name, and where its statement begins."""

    silent = silent_in(tree)

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
        elif node in silent:
            if isinstance(node, ast.If) and asks_others(node.test):
                yield from below(node.test, path, function, node.lineno)
        else:
            line = node.lineno if isinstance(node, ast.stmt) else line
            if function:
                yield node, function, line
            for child in _run(node):
                yield from below(child, path, function, line)

    for statement in tree.body:
        yield from below(statement, (), "", 0)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Its children but for annotations, which nothing evaluates."""
    left_out = getattr(node, "annotation", None)
    return (child for child in ast.iter_child_nodes(node) if child is not left_out)


class _Replaced(ast.NodeTransformer):
    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self._node, self._other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        return self._other if node is self._node else self.generic_visit(node)

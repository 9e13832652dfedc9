"""Texts of Python, TOML and Markdown files, and the names that Python files bind."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_EXEMPTION = re.compile(r"(?<!`)(?:#|<!--) language:(.*)$", re.MULTILINE)
_DIRECTIVE = re.compile(r"#\s*(?:!|noqa|type:|pyright:|ruff:|fmt:|pragma|language:)")


@dataclass(frozen=True)
class Text:
    kind: str  # docstring, comment, trailing, sentence or markdown
    line: int
    text: str
    last_line: int  # last line of a docstring, for exemptions


@dataclass(frozen=True)
class Name:
    kind: str  # variable, parameter, attribute, function or class
    line: int
    name: str


def texts_of_python(nodes: list[ast.AST], source: str) -> Iterator[Text]:
    """Yield docstrings, comments above code (a block is one text) and comments on a line of code."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                constant = node.body[0]
                yield Text("docstring", constant.lineno, docstring, constant.end_lineno or constant.lineno)
    above: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        if not token.line[: token.start[1]].strip():
            above.append(token)
        else:
            yield Text("trailing", token.start[0], _comment(token), token.start[0])
    for _, block in groupby(enumerate(above), lambda place: place[1].start[0] - place[0]):
        tokens = [token for _, token in block]
        text = "\n".join(map(_comment, tokens))
        yield Text("comment", tokens[0].start[0], text, tokens[0].start[0])


def _comment(token: tokenize.TokenInfo) -> str:
    return token.string.lstrip("# ")


def names_of_python(nodes: list[ast.AST]) -> Iterator[Name]:
    """Yield every name that these nodes bind, apart from imports."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield Name("variable", node.lineno, name)
            case ast.arg(arg=name):
                yield Name("parameter", node.lineno, name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield Name("attribute", node.lineno, name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Name("function", node.lineno, name)
            case ast.ClassDef(name=name):
                yield Name("class", node.lineno, name)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield Name("variable", node.lineno, name)
            case _:
                pass


def texts_of_toml(source: str, keys: Iterable[str]) -> Iterator[Text]:
    """Yield the values of these keys, wherever they are, and comments on their own line."""
    table = tomllib.loads(source)
    for key in keys:
        lines = [number for number, line in enumerate(source.splitlines(), 1) if _has_key(key, line)]
        for line, text in zip(lines, _values(table, key), strict=True):
            yield Text("sentence", line, text, line)
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("#"):
            yield Text("markdown", number, line.lstrip("# "), number)


def _has_key(key: str, line: str) -> bool:
    return re.search(rf"^(?:.*[{{,] *)?{key} *= *\"", line) is not None


def _values(table: Any, key: str) -> Iterator[str]:
    if isinstance(table, list):
        for entry in table:
            yield from _values(entry, key)
    elif isinstance(table, dict):
        for name, value in table.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _values(value, key)


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yield each line outside of code blocks."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield Text("markdown", number, line, number)


def exemptions(source: str) -> dict[int, str]:
    """Return the lines that are exempt from the rules, with their reasons."""
    if "language:" not in source:
        return {}
    lines = enumerate(source.splitlines(), 1)
    return {
        number: match[1].replace("-->", "").strip()
        for number, line in lines
        if (match := _EXEMPTION.search(line))
    }

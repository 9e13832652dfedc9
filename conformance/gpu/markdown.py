"""Tables and cells of Markdown, short enough to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_NAMED = 12
_LONGEST_CELL = 160


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(text: str) -> str:
    """Return one line of text that cannot break its table."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= _LONGEST_CELL else line[:_LONGEST_CELL] + " …"


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def named(names: Sequence[str], most: int = MOST_NAMED) -> str:
    more = f" and {len(names) - most} more, all in report.json" if len(names) > most else ""
    return ", ".join(names[:most]) + more

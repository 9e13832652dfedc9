"""What a command that judges writes on the terminal: bars while it runs, then what is broken, and the verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from conformance.judge.results import broken_clauses
from conformance.report.verdict import parts

_MOST_BROKEN, _MOST_REASONS = 10, 3  # in the terminal; the report has all


def progress_on(console: Console) -> Progress:
    bar = BarColumn(bar_width=32)
    return Progress(
        TextColumn("{task.description:9}"),
        bar,
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def begin(progress: Progress, name: str, total: int | None) -> TaskID:
    if not progress.console.is_terminal:  # no bar moves in a log
        progress.console.print(f"{name} …")
    return progress.add_task(name, total=total, note="")


def say_broken(console: Console, report: dict[str, Any]) -> None:
    """As soon as it is known: timing and training take longer than judging."""
    tell = _teller(console)
    broken = broken_clauses(report["tests"])
    for clause in broken[:_MOST_BROKEN]:
        console.print("[red]broken[/red] ", end="")
        tell(f"{clause.name}: {clause.count}", *(clause.says, clause.why, clause.replay), sep="\n       ")
    if len(broken) > _MOST_BROKEN:
        tell(f"       and {len(broken) - _MOST_BROKEN} more, in the report")


def say_verdict(
    console: Console, report: dict[str, Any], out: Path | None, changes: Sequence[str] = ()
) -> None:
    tell = _teller(console)
    for part in parts(report):
        tell(f"{part.name}: {part.says}")
        for reason in part.reasons[:_MOST_REASONS]:
            tell(f"  - {reason}")
        if len(part.reasons) > _MOST_REASONS:
            tell(f"  - and {len(part.reasons) - _MOST_REASONS} more, in the report")
    for line in changes:
        tell(line)
    colour = report["verdict"]  # either is one
    console.print(f"[bold {colour}]{report['verdict'].upper()}[/bold {colour}] ", end="")
    tell(f"{report['subject']}" + (f"; the report is {(out / 'index.html').absolute()}" if out else ""))


def _teller(console: Console) -> Callable[..., None]:
    return functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)

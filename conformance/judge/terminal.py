"""Terminal output of a command that judges: progress bars, then broken clauses and the verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from conformance.judge.results import broken_clauses
from conformance.report.verdict import parts

_MOST_BROKEN, _MOST_REASONS = 10, 3  # limits of the terminal, not of the report


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
    if not progress.console.is_terminal:  # a log shows no bars
        progress.console.print(f"{name} …")
    return progress.add_task(name, total=total, note="")


def print_broken(console: Console, report: dict[str, Any]) -> None:
    """Print the broken clauses. Called before timing and training, which take longer than judging."""
    write = _plain_print(console)
    broken = broken_clauses(report["tests"])
    for clause in broken[:_MOST_BROKEN]:
        console.print("[red]broken[/red] ", end="")
        write(f"{clause.name}: {clause.count}", *(clause.says, clause.why, clause.replay), sep="\n       ")
    if len(broken) > _MOST_BROKEN:
        write(f"       and {len(broken) - _MOST_BROKEN} more, in the report")


def print_verdict(
    console: Console, report: dict[str, Any], out: Path | None, changes: Sequence[str] = ()
) -> None:
    write = _plain_print(console)
    for part in parts(report):
        write(f"{part.name}: {part.says}")
        for reason in part.reasons[:_MOST_REASONS]:
            write(f"  - {reason}")
        if len(part.reasons) > _MOST_REASONS:
            write(f"  - and {len(part.reasons) - _MOST_REASONS} more, in the report")
    for line in changes:
        write(line)
    colour = report["verdict"]  # "green" or "red"
    console.print(f"[bold {colour}]{report['verdict'].upper()}[/bold {colour}] ", end="")
    write(f"{report['subject']}" + (f"; the report is {(out / 'index.html').absolute()}" if out else ""))


def _plain_print(console: Console) -> Callable[..., None]:
    return functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)

"""Output of a command that judges: progress bars or lines, then broken clauses and the verdict."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn

from conformance.judge.results import broken_clauses
from conformance.report.verdict import parts

_SECONDS_BETWEEN_LINES = 30.0
_MOST_BROKEN, _MOST_REASONS = 10, 3  # limits of the terminal, not of the report


class PhaseProgress(Progress):
    """Progress bars of phases. A log, which shows no bars, gets a line at least every 30 seconds while one runs."""

    _next_line_s = 0.0

    def begin(self, name: str) -> TaskID:
        """Add a phase, whose number of tests is not known yet."""
        if not self.console.is_terminal:
            self.console.print(f"{name} …")
            self._next_line_s = self.get_time() + _SECONDS_BETWEEN_LINES
        return self.add_task(name, total=None, note="")

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = self.tasks[self.task_ids.index(task_id)]
        is_due = self.get_time() >= self._next_line_s and not task.finished
        if is_due and not self.console.is_terminal:
            self._next_line_s = self.get_time() + _SECONDS_BETWEEN_LINES
            self.console.print(_line(task), markup=False, highlight=False)


def _line(task: Task) -> str:
    elapsed = datetime.timedelta(seconds=int(task.elapsed or 0.0))
    tests = f"{task.completed:g} of {task.total:g} tests" if task.total else ""
    return f"{task.description} " + ", ".join(filter(None, (str(elapsed), tests, task.fields["note"])))


def progress_on(console: Console) -> PhaseProgress:
    return PhaseProgress(
        TextColumn("{task.description:9}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


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

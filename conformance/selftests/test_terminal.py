"""Tests of the progress of phases, on a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from conformance.cli.terminal import progress_on


def test_log_gets_line_of_progress_every_30_seconds() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now)) as progress:
        task = progress.begin("judging")
        for second in range(65):
            now = float(second)
            progress.update(task, total=100, completed=second, note="2 red")
        assert log.getvalue().splitlines() == [
            "judging …",
            "judging 0:00:30, 30 of 100 tests, 2 red",
            "judging 0:01:00, 60 of 100 tests, 2 red",
        ]


def test_phase_without_tests_prints_elapsed_time() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now)) as progress:
        task = progress.begin("timing")
        now = 31.0
        progress.update(task)
        now = 62.0
        progress.update(task, total=1, completed=1)
        assert log.getvalue().splitlines() == ["timing …", "timing 0:00:31"]


def test_terminal_gets_no_progress_lines() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now, force_terminal=True)) as progress:
        task = progress.begin("judging")
        now = 31.0
        progress.update(task, completed=1)
        assert "judging …" not in log.getvalue()
        assert "judging 0:00:31" not in log.getvalue()

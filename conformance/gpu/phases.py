"""The phases, one process each, and the clock over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.gpu.phase_rows import PROGRESS, PhaseRows, PhaseTask, read_rows, say

ROOT = Path(__file__).parents[2]
OUT_OF_TIME = "not run: out of time"
LEFT_OUT = "left out by --only"
STOPPED = "not run: stopped by the user"
NO_CUDA = "not run: there is no CUDA device that torch can use"

_LEAST_S = 2.0  # less is not worth the start of a process
_RESERVE = 0.04  # share of all time, reserved for the bundle
_MOST_SPARE = 1 / 3  # largest share of the other time for a slow disk
_GRACE_S = 6.0  # time for a phase to write results after its interrupt
_HEADROOM_S = 1.0  # time for a phase to finish its current row
_LONGEST_LINE = 240
_MOST_LINES = 400


@dataclass(frozen=True)
class GpuPhase:
    name: str
    # Share of the time that fixed seconds leave. It is 0 if more time measures nothing more.
    weight: float
    command: Callable[[PhaseTask], list[str]]
    environ: Callable[[PhaseTask], Mapping[str, str]] = lambda task: {}
    is_judging: bool = False  # whether the verdict needs its complete result
    # Time that the phase needs, as measured on an H100 and its host. With a weight: until its first rows.
    fixed_s: float = 10.0
    spare_s: float = 0.0  # additional time on a slow disk


@dataclass
class PhaseRun:
    """Result of a phase."""

    phase: GpuPhase
    why: str = ""  # reason why it is incomplete; empty if complete
    seconds: float = 0.0
    recorded: PhaseRows = field(default_factory=lambda: PhaseRows([], []))
    not_run: list[str] = field(default_factory=list)

    @property
    def is_left_out(self) -> bool:
        return self.why == LEFT_OUT

    @property
    def was_cut(self) -> bool:
        return self.why.startswith(("cut", "not run"))


def module(name: str) -> Callable[[PhaseTask], list[str]]:
    """Return the command of a phase that runs a module of this package."""
    return lambda task: [sys.executable, "-m", f"conformance.gpu.{name}", task.as_word()]


class Clock:
    """End of each phase's time, if all earlier phases used their full share. Time that they leave is added.

    Fixed seconds are given in the order of the phases until the budget ends. Later phases are cut if it is too short.
    """

    def __init__(self, phases: Sequence[GpuPhase], budget_s: float, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self.budget_s = budget_s
        usable_s = budget_s * (1 - _RESERVE) - _GRACE_S
        fixed_s = sum(phase.fixed_s for phase in phases)
        # Smallest budget in which every phase has its fixed seconds.
        self.needed_s = (fixed_s + _GRACE_S) / (1 - _RESERVE)
        rest_s = max(usable_s - fixed_s, 0.0)
        spare_s = sum(phase.spare_s for phase in phases)
        of_spare = min(1.0, _MOST_SPARE * rest_s / spare_s) if spare_s else 0.0
        rest_s -= of_spare * spare_s
        # If more time measures nothing more, it is a margin of every phase.
        weights = [phase.weight for phase in phases]
        if not any(weights):
            weights = [phase.fixed_s for phase in phases]
        of_weight = rest_s / (sum(weights) or 1.0)
        self._until_s: dict[str, float] = {}
        until_s = 0.0
        for phase, weight in zip(phases, weights, strict=True):
            until_s += phase.fixed_s + of_spare * phase.spare_s + of_weight * weight
            self._until_s[phase.name] = min(until_s, usable_s)

    def left_s(self, phase: GpuPhase) -> float:
        return self._until_s[phase.name] - self.elapsed_s

    @property
    def shortage(self) -> str:
        """A warning that the budget is too short for the fixed seconds of all phases, or ""."""
        if self.needed_s <= self.budget_s:
            return ""
        return (
            f"the phases need about {self.needed_s:.0f} s before any elastic one measures more than its first rows; "
            f"{self.budget_s:.0f} s are given: later ones will be cut"
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def run(phase: GpuPhase, task: PhaseTask, log: Path, most_s: float) -> PhaseRun:
    """Run one phase for at most `most_s` seconds."""
    if most_s < _LEAST_S:
        return PhaseRun(phase, OUT_OF_TIME, not_run=[phase.name])
    began = time.monotonic()
    task = replace(task, until=began + most_s - _HEADROOM_S)
    ended, code = _run(phase.command(task), {**os.environ, **phase.environ(task)}, log, most_s)
    recorded = read_rows(Path(task.rows))
    why = ended or ("" if code in (0, None) else f"ended with code {code}: {_last_words(log)}")
    # Code 1 of pytest means that tests failed, which their rows say too.
    if phase.is_judging and code == 1 and recorded.rows and not ended:
        why = ""
    not_run = recorded.missing or ([phase.name] if why and not recorded.rows else [])
    if not_run and not why:
        why = f"cut: {len(not_run)} of {len(recorded.planned)} {OUT_OF_TIME}"
    return PhaseRun(phase, why, round(time.monotonic() - began, 1), recorded, not_run)


def _run(command: list[str], environ: Mapping[str, str], log: Path, most_s: float) -> tuple[str, int | None]:
    """Run a command and end all processes that it started. Return why it was stopped, if so, and its exit code."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=environ, start_new_session=True
        )  # fmt: skip
        reader = threading.Thread(target=_pass_on, args=(process.stdout, output), daemon=True)
        reader.start()
        try:
            return "", process.wait(most_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S - 1)
            return f"cut after {most_s:.0f} s", None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A hanging driver may keep the process alive, and a process that left the group may keep the pipe open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            reader.join(1)


def _pass_on(source: Any, log: Any) -> None:
    shown = 0
    # The log may be closed, because _run stops waiting for this thread.
    with source, contextlib.suppress(ValueError, OSError):
        for line in source:
            log.write(line)
            log.flush()
            text = line.decode(errors="replace").rstrip()
            if text.startswith(PROGRESS) and shown < _MOST_LINES:
                shown += 1
                say(f"   {text.removeprefix(PROGRESS)[:_LONGEST_LINE]}")


def _last_words(log: Path, longest: int = 1_500) -> str:
    """Return the last line, which names the error of a traceback, and the lines before it below."""
    before, _, last = log.read_text(errors="replace").strip()[-longest:].rpartition("\n")
    return f"{last}\n{before}".strip()


def run_all(
    phases: Sequence[GpuPhase],
    task: PhaseTask,
    clock: Clock,
    folder: Path,
    on_end: Callable[[PhaseRun], object],
) -> None:
    """Run the phases in turn, and report each one when it ends."""
    stopped = False
    for phase in phases:
        file, log = folder / f"{phase.name}.jsonl", folder / f"{phase.name}.log"
        if stopped:
            on_end(PhaseRun(phase, STOPPED, not_run=[phase.name]))
            continue
        left_s = clock.left_s(phase)
        say(
            f"== {phase.name} ({clock.elapsed_s:.0f} of {clock.budget_s:.0f} s gone, at most {max(left_s, 0):.0f} s)"
        )
        try:
            ran = run(phase, replace(task, rows=str(file)), log, left_s)
        except KeyboardInterrupt:
            stopped = True
            recorded = read_rows(file)
            ran = PhaseRun(phase, STOPPED, recorded=recorded, not_run=recorded.missing or [phase.name])
        say(f"   {ran.why.splitlines()[0] if ran.why else 'whole'} ({ran.seconds:.1f} s)")
        on_end(ran)

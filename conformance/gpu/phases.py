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

from conformance.gpu.phase_rows import PROGRESS, Found, PhaseTask, read_rows, say

ROOT = Path(__file__).parents[2]
OUT_OF_TIME = "not run: out of time"
LEFT_OUT = "left out by --only"
STOPPED = "not run: stopped by the user"
NO_CUDA = "not run: there is no CUDA device that torch can use"

_LEAST_S = 2.0  # less is not worth the start of a process
_RESERVE = 0.04  # of the whole, for the bundle
_MOST_FIXED = 2 / 3  # of the usable time, for fixed seconds
_GRACE_S = 6.0  # from the interrupt, after which a phase may still write, to its end
_HEADROOM_S = 1.0  # a phase that ends by itself keeps what it is in the midst of
_LONGEST_LINE = 240
_MOST_LINES = 400


@dataclass(frozen=True)
class GpuPhase:
    name: str
    weight: float  # its part of the time that fixed seconds leave
    command: Callable[[PhaseTask], list[str]]
    environ: Callable[[PhaseTask], Mapping[str, str]] = lambda task: {}
    is_judging: bool = False  # without its whole result nothing is shown
    fixed_s: float = 3.0  # in addition: time to start a process and import torch


@dataclass
class Ran:
    """What became of a phase."""

    phase: GpuPhase
    why: str = ""  # it is not whole; empty if it is
    seconds: float = 0.0
    found: Found = field(default_factory=lambda: Found([], []))
    not_run: list[str] = field(default_factory=list)

    @property
    def is_left_out(self) -> bool:
        return self.why == LEFT_OUT

    @property
    def was_cut(self) -> bool:
        return self.why.startswith(("cut", "not run"))


def module(name: str) -> Callable[[PhaseTask], list[str]]:
    """A module of this package as a phase."""
    return lambda task: [sys.executable, "-m", f"conformance.gpu.{name}", task.as_word()]


class Clock:
    """When each phase must have ended, if all before it took their whole share; what they leave is added."""

    def __init__(self, phases: Sequence[GpuPhase], budget_s: float, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self.budget_s = budget_s
        usable_s = budget_s * (1 - _RESERVE) - _GRACE_S
        fixed_s = sum(phase.fixed_s for phase in phases)
        of_fixed = min(1.0, _MOST_FIXED * usable_s / fixed_s) if fixed_s else 0.0
        whole = sum(phase.weight for phase in phases) or 1.0
        of_weight = (usable_s - of_fixed * fixed_s) / whole
        self._until_s: dict[str, float] = {}
        until_s = 0.0
        for phase in phases:
            until_s += of_fixed * phase.fixed_s + of_weight * phase.weight
            self._until_s[phase.name] = until_s

    def left_s(self, phase: GpuPhase) -> float:
        return self._until_s[phase.name] - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def run(phase: GpuPhase, task: PhaseTask, log: Path, most_s: float) -> Ran:
    """Run one phase, in its share of the time."""
    if most_s < _LEAST_S:
        return Ran(phase, OUT_OF_TIME, not_run=[phase.name])
    began = time.monotonic()
    task = replace(task, until=began + most_s - _HEADROOM_S)
    ended, code = _run(phase.command(task), {**os.environ, **phase.environ(task)}, log, most_s)
    found = read_rows(Path(task.rows))
    why = ended or ("" if code in (0, None) else f"ended with code {code}: {_last_words(log)}")
    # pytest tells by 1 that tests failed, which their rows tell too.
    if phase.is_judging and code == 1 and found.rows and not ended:
        why = ""
    not_run = found.missing or ([phase.name] if why and not found.rows else [])
    if not_run and not why:
        why = f"cut: {len(not_run)} of {len(found.planned)} {OUT_OF_TIME}"
    return Ran(phase, why, round(time.monotonic() - began, 1), found, not_run)


def _run(command: list[str], environ: Mapping[str, str], log: Path, most_s: float) -> tuple[str, int | None]:
    """Why it was stopped, and its code; with it ends all that it started."""
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it for good
                process.wait(1)
            reader.join(1)  # somebody who left the process group may hold the pipe open


def _pass_on(source: Any, log: Any) -> None:
    shown = 0
    with (
        source,
        contextlib.suppress(ValueError, OSError),
    ):  # the log was closed under a reader that nobody waits for
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
    phases: Sequence[GpuPhase], task: PhaseTask, clock: Clock, folder: Path, on_end: Callable[[Ran], object]
) -> None:
    """Run the phases in turn, telling of each as it ends."""
    stopped = False
    for phase in phases:
        file, log = folder / f"{phase.name}.jsonl", folder / f"{phase.name}.log"
        if stopped:
            on_end(Ran(phase, STOPPED, not_run=[phase.name]))
            continue
        left_s = clock.left_s(phase)
        say(
            f"== {phase.name} ({clock.elapsed_s:.0f} of {clock.budget_s:.0f} s gone, at most {max(left_s, 0):.0f} s)"
        )
        try:
            ran = run(phase, replace(task, rows=str(file)), log, left_s)
        except KeyboardInterrupt:
            stopped = True
            found = read_rows(file)
            ran = Ran(phase, STOPPED, found=found, not_run=found.missing or [phase.name])
        say(f"   {ran.why.splitlines()[0] if ran.why else 'whole'} ({ran.seconds:.1f} s)")
        on_end(ran)

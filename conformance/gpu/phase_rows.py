"""What a phase is told, and how it tells what it finds: a line of JSON each, safe at once from whatever comes next."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRESS = ">> "  # begins the lines of output that are shown while a phase runs
LONGEST_TEXT = 2_000
VARIABLE = "TANDEM_GPU_TASK"  # by which a plugin of pytest learns of its task


@dataclass(frozen=True)
class PhaseTask:
    """What a phase is told, in one word of its command line."""

    rows: str  # the file for its rows
    until: float  # when it should have ended, by this machine's monotonic clock
    device: str = "cpu"  # cpu or cuda
    subject: str = "impl"
    profile: str = "quick"
    seed: int | None = None
    tests: str = "conformance"  # what the judge is asked for
    probes: str = ""  # the rows of the phase `probe`
    machine: str = ""  # name of its timings; empty: this machine's own name, if any
    devices: str = ""  # comma-separated, for the judge; empty: `device`
    ranks: str = ""  # the backend of CUDA ranks in the judge; empty: gloo, or NCCL if each rank has a GPU
    workers: int | None = None  # of the judge; None: by cores and GPUs
    deadline_s: float | None = None  # how long a test of the judge may hang; None: by the device

    def as_word(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_word(cls, word: str) -> PhaseTask:
        return cls(**json.loads(word))


class Rows:
    """The file that a phase writes."""

    def __init__(self, task: PhaseTask) -> None:
        self._until = task.until
        self._file = Path(task.rows).open("a", buffering=1)  # noqa: SIM115 open as long as the process lives

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def plan(self, names: Iterable[str]) -> None:
        """Name what is to come; what of it gets no row did not run."""
        self._write({"planned": list(names)})

    def add(self, name: str, outcome: str, says: str = "", **found: Any) -> None:
        """Write a row and show it."""
        self.write(name, outcome, says=says[:LONGEST_TEXT], **found)
        self.tell(f"{name}: {outcome}" + (f", {says.splitlines()[0]}" if says else ""))

    def write(self, name: str, outcome: str, **found: Any) -> None:
        self._write({"name": name, "outcome": outcome, **found})

    def tell(self, text: str) -> None:
        say(f"{PROGRESS}{text}")

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True)
class Found:
    """The file that a phase has written, read."""

    planned: list[str]
    rows: list[dict[str, Any]]

    @property
    def missing(self) -> list[str]:
        seen = {row["name"] for row in self.rows}
        return [name for name in self.planned if name not in seen]


def read_rows(file: Path) -> Found:
    found = Found([], [])
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):  # the last line of a phase that was killed
            entry = json.loads(line)
            if "planned" in entry:
                found.planned.extend(entry["planned"])
            else:
                found.rows.append(entry)
    return found


def serve(work: Callable[[PhaseTask, Rows], None]) -> None:
    """Be a phase: the whole of a module that is run as one."""
    task = PhaseTask.of_word(sys.argv[1])
    work(task, Rows(task))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

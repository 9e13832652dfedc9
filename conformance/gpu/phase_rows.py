"""Arguments and results of a phase. Each is a line of JSON, written at once, so that a later crash loses nothing."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRESS = ">> "  # begins the lines of output that are shown while a phase runs
LONGEST_TEXT = 2_000
VARIABLE = "TANDEM_GPU_TASK"  # task of the pytest plugin
BENCHMARKS = "asv-benchmarks.json"  # asv's description, written by the phase `speed`


@dataclass(frozen=True)
class PhaseTask:
    """Arguments of a phase, passed as one word of its command line."""

    rows: str  # the file for its rows
    until: float  # end of its time, on this machine's monotonic clock
    device: str = "cpu"  # cpu or cuda
    subject: str = "impl"
    profile: str = "quick"
    seed: int | None = None
    tests: str = "conformance"  # tests to judge
    probes: str = ""  # the rows of the phase `probe`
    machine: str = ""  # name of its timings; empty: this machine's own name, if any
    devices: str = ""  # comma-separated, for the judge; empty: `device`
    # Backend of CUDA ranks in the judge. Empty: NCCL.
    ranks: str = ""
    workers: int | None = None  # workers of the judge; None: by cores and GPUs
    deadline_s: float | None = None  # time limit of a test; None: by the device

    def as_word(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_word(cls, word: str) -> PhaseTask:
        return cls(**json.loads(word))


# Outcome of a row, a text about it, and further entries.
Result = tuple[str, str, dict[str, Any]]


class Rows:
    """Writer of a phase's file."""

    def __init__(self, task: PhaseTask) -> None:
        self._until = task.until
        self._file = Path(task.rows).open("a", buffering=1)  # noqa: SIM115 open as long as the process lives

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def plan(self, names: Iterable[str]) -> None:
        """Write the names of the rows to come. A planned name without a row did not run."""
        self._write({"planned": list(names)})

    def run(self, measures: Mapping[str, Callable[[], Result]]) -> None:
        """Plan a row for each name, then measure one after the other while time is left."""
        self.plan(measures)
        for name, measure in measures.items():
            if self.left_s <= 0:
                return
            self.measure(name, measure)

    def measure(self, name: str, measure: Callable[[], Result]) -> None:
        """Write the row of a measurement, which raises NotImplementedError if it cannot run here."""
        try:
            outcome, says, entries = measure()
        except NotImplementedError as missing:
            outcome, says, entries = "not available", str(missing), {}
        except Exception as error:  # the others are still worth measuring
            outcome, says, entries = "failed", in_words(error), {}
        self.add(name, outcome, says, **entries)

    def add(self, name: str, outcome: str, says: str = "", **entries: Any) -> None:
        """Write a row and show it."""
        self.write(name, outcome, says=says[:LONGEST_TEXT], **entries)
        self.tell(f"{name}: {outcome}" + (f", {says.splitlines()[0]}" if says else ""))

    def write(self, name: str, outcome: str, **entries: Any) -> None:
        self._write({"name": name, "outcome": outcome, **entries})

    def tell(self, text: str) -> None:
        say(f"{PROGRESS}{text}")

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True)
class PhaseRows:
    """Contents of a phase's file."""

    planned: list[str]
    rows: list[dict[str, Any]]

    @property
    def missing(self) -> list[str]:
        recorded = {row["name"] for row in self.rows}
        return [name for name in self.planned if name not in recorded]


def read_rows(file: Path) -> PhaseRows:
    recorded = PhaseRows([], [])
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):  # the last line of a phase that was killed
            entry = json.loads(line)
            if "planned" in entry:
                recorded.planned.extend(entry["planned"])
            else:
                recorded.rows.append(entry)
    return recorded


def serve(work: Callable[[PhaseTask, Rows], None]) -> None:
    """Run `work` as the main function of a phase's module."""
    task = PhaseTask.of_word(sys.argv[1])
    work(task, Rows(task))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

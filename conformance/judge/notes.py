"""What the processes of one run leave for each other in a folder, so that it outlives any of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_INPUT = "conformance_notes"  # by which a worker of pytest-xdist learns of the folder
_MOST_STACK = 2000
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)


@dataclass(frozen=True)
class Incident:
    """A test that hung or took its process along."""

    nodeid: str
    outcome: str  # hang or crash
    reason: str


class Notes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incidents_file = folder / "incidents.jsonl"
        self._read_bytes = 0
        self._incidents: list[Incident] = []

    @classmethod
    def of(cls, config: pytest.Config) -> Notes:
        """The run's; the process that is no worker makes the folder, and removes it in the end."""
        given = getattr(config, "workerinput", {}).get(_INPUT)
        notes = cls(Path(given or tempfile.mkdtemp(prefix="conformance-")))
        if not given:
            config.pluginmanager.register(_Owner(notes))
        return notes

    def note(self, incident: Incident) -> None:
        with self.incidents_file.open("a") as file:
            file.write(json.dumps(asdict(incident)) + "\n")

    def incidents(self) -> list[Incident]:
        """All that any process has noted by now."""
        if self.incidents_file.is_file() and self.incidents_file.stat().st_size > self._read_bytes:
            with self.incidents_file.open() as file:
                file.seek(self._read_bytes)
                self._incidents += [Incident(**json.loads(line)) for line in file]
                self._read_bytes = file.tell()
        return self._incidents

    def stack_file(self, worker: str) -> Path:
        """Where a worker writes the stacks of its threads in its last moment."""
        return self.folder / f"stacks-{worker}"

    def last_stack(self, worker: str) -> str:
        """Of the thread that died, or else of the main thread, which faulthandler tells last."""
        file = self.stack_file(worker)
        threads = _THREAD.split(file.read_text(errors="replace"))[1:] if file.is_file() else []
        died = [thread for thread in threads if thread.startswith("Current")]
        return "".join([*threads[-1:], *died][-1:])[:_MOST_STACK]

    def keep_clauses(self, clauses: Mapping[str, str]) -> None:
        """The clause of each test that was collected; every worker collects the same."""
        part = self.folder / f"clauses-{os.getpid()}"
        part.write_text(json.dumps(clauses))
        part.rename(self.folder / "clauses.json")

    def clauses(self) -> dict[str, str]:
        file = self.folder / "clauses.json"
        return json.loads(file.read_text()) if file.is_file() else {}


class _Owner:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        node.workerinput[_INPUT] = str(self._notes.folder)  # pyright: ignore[reportAttributeAccessIssue]

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._notes.folder, ignore_errors=True)

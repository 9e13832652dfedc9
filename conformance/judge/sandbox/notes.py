"""Notes that the processes of one run exchange in a folder, so that they survive the end of any process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

_INPUT = "conformance_notes"  # key in the input of a pytest-xdist worker
_MOST_STACK = 2000
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)


@dataclass(frozen=True)
class Incident:
    """A test that hung or ended its process."""

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
    def of_run(cls, config: pytest.Config) -> Notes:
        """Return the run's notes. The controlling process creates the folder and removes it at the end."""
        folder = getattr(config, "workerinput", {}).get(_INPUT)
        notes = cls(Path(folder or tempfile.mkdtemp(prefix="conformance-")))
        if not folder:
            config.pluginmanager.register(_Owner(notes))
        return notes

    def note(self, incident: Incident) -> None:
        with self.incidents_file.open("a") as file:
            file.write(json.dumps(asdict(incident)) + "\n")

    def incidents(self) -> list[Incident]:
        """Return the incidents that all processes have noted until now."""
        if self.incidents_file.is_file() and self.incidents_file.stat().st_size > self._read_bytes:
            with self.incidents_file.open() as file:
                file.seek(self._read_bytes)
                self._incidents += [Incident(**json.loads(line)) for line in file]
                self._read_bytes = file.tell()
        return self._incidents

    def stack_file(self, worker: str) -> Path:
        """Return the file that a worker writes the stacks of its threads to when it is killed."""
        return self.folder / f"stacks-{worker}"

    def last_stack(self, worker: str) -> str:
        """Return the stack of the thread that died, or else of the main thread, which faulthandler prints last."""
        file = self.stack_file(worker)
        threads = _THREAD.split(file.read_text(errors="replace"))[1:] if file.is_file() else []
        died = [thread for thread in threads if thread.startswith("Current")]
        return "".join([*threads[-1:], *died][-1:])[:_MOST_STACK]

    def keep(self, name: str, value: object) -> None:
        """Write a value for the other processes. Every worker writes the same values."""
        partial = self.folder / f"{name}-{os.getpid()}"
        partial.write_text(json.dumps(value))
        partial.rename(self.folder / f"{name}.json")

    def read(self, name: str) -> Any:
        """Return a value that any process has written, or an empty dict."""
        file = self.folder / f"{name}.json"
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
